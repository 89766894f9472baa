"""`status --watch`: events of the broker as they happen, under a live table of the leases on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from infra.api.client import ApiClient, StreamEvent
from infra.cli.common import say

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_AT_FIRST = 10
"""Past events that a person is shown at the start."""


class Show(Protocol):
    """Where events and leases go."""

    def event(self, event: Mapping[str, Any]) -> None: ...

    def leases(self, rows: list[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


def watch(api: ApiClient, as_json: bool) -> None:
    """Show events until Ctrl-C.

    Raises:
        ShoalError: the cluster cannot be reached.
    """
    first = 0 if as_json else SHOWN_AT_FIRST
    show: Show | None = None
    try:
        show = JsonLines() if as_json else LiveTable() if sys.stdout.isatty() else Lines()
        say("watching; Ctrl-C ends this")
        follow(api.stream("/events/stream", first=first), show)
    except KeyboardInterrupt:
        pass  # how a watch ends
    finally:
        if show is not None:
            show.close()


def follow(stream: Iterable[StreamEvent], show: Show) -> None:
    """Show what a stream tells, for as long as it does."""
    for told in stream:
        if told.kind == "event":
            show.event(told.data)
        elif told.kind == "leases":
            show.leases(told.data)
        else:
            say(told.data["text"])


def event_line(event: Mapping[str, Any]) -> str:
    """An event for people: the time here, and what happened."""
    time = datetime.fromisoformat(event["time"]).astimezone()
    return f"{time:%H:%M:%S} {event['reason']}"


class JsonLines:
    """One JSON document an event on standard output."""

    def event(self, event: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    def leases(self, rows: list[dict[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """One line an event on standard output."""

    def event(self, event: Mapping[str, Any]) -> None:
        print(event_line(event), flush=True)

    def leases(self, rows: list[dict[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass


class LiveTable:
    """Events above, the leases below, on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def event(self, event: Mapping[str, Any]) -> None:
        self._console.print(event_line(event), markup=False, soft_wrap=True)

    def leases(self, rows: list[dict[str, Any]]) -> None:
        self._live.update(leases_table(rows), refresh=True)

    def close(self) -> None:
        self._live.stop()


def leases_table(rows: list[dict[str, Any]]) -> Table:
    """Who has how many of what it wants."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="leases", title_justify="left", title_style="bold")
    columns = ("holder", "kind", "min", "max", "granted", "wants")
    for column in columns:
        table.add_column(column, no_wrap=column == "holder")
    for row in rows:
        table.add_row(*(Text(str(row[column])) for column in columns))
    return table
