"""Follows a running job from its two logs, wherever they lie, until it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cluster.files.line_reader import LineReader
from cluster.files.storage import Storage
from infra.job_view import JobView
from train_jobs.records.listing import RAY_ENDED
from train_jobs.records.run_log import EVENTS, METRICS, RunSummary

_POLL_S = 0.2
_DRIVER_POLL_S = 2.0


def follow(
    storage: Storage,
    summary: RunSummary,
    driver_status: Callable[[], str | None],
    view: JobView,
) -> str | None:
    """Feed `summary` and `view` until the job has ended.

    Args:
        storage: the run's directory.
        driver_status: Ray's status of the submission.

    Returns:
        None, or Ray's final status when the driver died without saying how the job ended.
    """
    events, metrics = LineReader(storage, EVENTS), LineReader(storage, METRICS)
    pause = threading.Event()
    next_look = time.monotonic() + _DRIVER_POLL_S
    while True:
        for event in events.new():
            summary.apply(event)
            view.event(event, summary)
        for line in metrics.new():
            summary.step, summary.metrics = line["step"], line
            view.metric(line, summary)
        if summary.ended:
            return None
        if time.monotonic() >= next_look:
            status = driver_status()
            if status in RAY_ENDED:
                # What the driver wrote last may have come after our last look.
                for event in events.new():
                    summary.apply(event)
                    view.event(event, summary)
                return None if summary.ended else status
            next_look = time.monotonic() + _DRIVER_POLL_S
        pause.wait(_POLL_S)
