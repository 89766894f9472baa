"""Where a job's time went, and where its output is, in a line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def goodput_line(account: dict[str, Any]) -> str:
    """Where a job's time went, the greatest loss first; nothing of a job that never had a lease."""
    if not account["wall_s"]:
        return ""
    losses = sorted(account["losses_s"].items(), key=lambda item: -item[1])
    words = [
        f"{cause.removeprefix('after_')} failures {seconds:.1f} s"
        if cause.startswith("after_")
        else f"{cause} {seconds:.1f} s"
        for cause, seconds in losses
        if seconds >= 0.05
    ]
    if account["goodput"] is None:
        return f"no step was logged in {account['wall_s']:.1f} s: {', '.join(words)}"
    lost = f"; lost to {', '.join(words)}" if words else ""
    useful = f"{account['useful_s']:.1f} s of useful steps in {account['wall_s']:.1f} s"
    return f"goodput {account['goodput']:.1%}: {useful}{lost}"


def ranks_line(job: str, path: str) -> str:
    """Where all is that the ranks of a script printed; nothing of a job whose ranks print nothing.

    Args:
        path: the job's directory.
    """
    logs = Path(path) / "logs"
    return f"what its ranks printed: {logs}; `shoal logs {job} --rank all`" if logs.is_dir() else ""
