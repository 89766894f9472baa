"""Reading a stream of events as clients have to: whoever waits for long is sent comments in between."""

from __future__ import annotations

DONE = "[DONE]"
_DATA = "data: "


def data_of(line: str) -> str | None:
    """What a line carries; None for a blank line, and for a comment that keeps a silent connection open."""
    return line.removeprefix(_DATA) if line.startswith(_DATA) else None
