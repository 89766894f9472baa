"""A running job from its logs, wherever they lie: what is new in them, and how that is shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from cluster.files.line_reader import LineReader
from cluster.files.storage import Storage
from infra.job_view import JobView
from infra.rank_output import RankOutput
from train_jobs.records.job_status import RAY_ENDED
from train_jobs.records.run_log import EVENTS, METRICS, RunSummary

_POLL_S = 0.2
_DRIVER_POLL_S = 2.0

EntryKind = Literal["event", "metric", "printed"]
JobEntry = tuple[EntryKind, dict[str, Any]]
"""An event of the run, a line of its metrics, or a line that rank 0 of a script has printed."""


class JobLogs:
    """The logs of a run, and what they have told so far.

    Args:
        run: the run's directory.
    """

    def __init__(self, run: Storage, job: str) -> None:
        self.summary = RunSummary(job)
        self._output = RankOutput(run)
        self._events, self._metrics = LineReader(run, EVENTS), LineReader(run, METRICS)

    def new(self) -> Iterator[JobEntry]:
        """What is new: events first, then metrics, then what was printed. It counts in `summary`."""
        for event in self._events.new():
            yield "event", take("event", event, self.summary)
        for line in self._metrics.new():
            yield "metric", take("metric", line, self.summary)
        if self.summary.task == "script":
            for printed in self._output.new(last=self.summary.ended):
                yield "printed", printed.as_json()

    def pass_over(self) -> None:
        """Take in what is there, and tell nobody."""
        for _ in self.new():
            pass


def take(kind: EntryKind, entry: dict[str, Any], summary: RunSummary) -> dict[str, Any]:
    """Let an entry count in a summary; the entry."""
    if kind == "event":
        summary.apply(entry)
    elif kind == "metric":
        summary.step, summary.metrics = entry["step"], entry
        summary.steps = entry.get("steps", summary.steps)
    return entry


def show(kind: EntryKind, entry: dict[str, Any], summary: RunSummary, view: JobView) -> None:
    """Show an entry that counts in the summary."""
    if kind == "event":
        view.event(entry, summary)
    elif kind == "metric":
        view.metric(entry, summary)
    else:
        view.line(entry["line"])


def follow(logs: JobLogs, driver_status: Callable[[], str | None], view: JobView) -> str | None:
    """Show a job until it has ended.

    Args:
        driver_status: Ray's status of the submission.

    Returns:
        None, or Ray's final status when the driver died without saying how the job ended.
    """
    pause = threading.Event()
    next_look = time.monotonic() + _DRIVER_POLL_S

    def look() -> None:
        for kind, entry in logs.new():
            show(kind, entry, logs.summary, view)

    while True:
        look()
        if logs.summary.ended:
            return None
        if time.monotonic() >= next_look:
            status = driver_status()
            if status in RAY_ENDED:
                # What the driver wrote last may have come after our last look.
                look()
                return None if logs.summary.ended else status
            next_look = time.monotonic() + _DRIVER_POLL_S
        pause.wait(_POLL_S)
