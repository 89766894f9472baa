"""Follows a running job from its two logs, wherever they lie, until it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cluster.files.line_reader import LineReader
from cluster.files.storage import Storage
from infra.job_view import JobView
from infra.rank_output import RankOutput
from train_jobs.records.listing import RAY_ENDED
from train_jobs.records.run_log import EVENTS, METRICS, RunSummary

_POLL_S = 0.2
_DRIVER_POLL_S = 2.0


class JobLogs:
    """The two logs of a run, and what they have told so far.

    Args:
        storage: the run's directory.
    """

    def __init__(self, storage: Storage, job: str) -> None:
        self.summary = RunSummary(job)
        self._output = RankOutput(storage)
        self._events, self._metrics = LineReader(storage, EVENTS), LineReader(storage, METRICS)

    def show(self, view: JobView | None = None) -> None:
        """Take in what is new, and show it; without a view it is only taken in.

        Of a script that is what its rank 0 prints, too.
        """
        for event in self._events.new():
            self.summary.apply(event)
            if view is not None:
                view.event(event, self.summary)
        for line in self._metrics.new():
            self.summary.step, self.summary.metrics = line["step"], line
            self.summary.steps = line.get("steps", self.summary.steps)
            if view is not None:
                view.metric(line, self.summary)
        if self.summary.task == "script":
            for printed in self._output.new(last=self.summary.ended):
                if view is not None:
                    view.line(printed.text)


def follow(logs: JobLogs, driver_status: Callable[[], str | None], view: JobView) -> str | None:
    """Show a job until it has ended.

    Args:
        driver_status: Ray's status of the submission.

    Returns:
        None, or Ray's final status when the driver died without saying how the job ended.
    """
    pause = threading.Event()
    next_look = time.monotonic() + _DRIVER_POLL_S
    while True:
        logs.show(view)
        if logs.summary.ended:
            return None
        if time.monotonic() >= next_look:
            status = driver_status()
            if status in RAY_ENDED:
                # What the driver wrote last may have come after our last look.
                logs.show(view)
                return None if logs.summary.ended else status
            next_look = time.monotonic() + _DRIVER_POLL_S
        pause.wait(_POLL_S)
