"""Follows a running job from its two logs, wherever they lie, until it has ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from cluster.storage import Storage
from infra.job_view import JobView
from train_jobs.listing import RAY_ENDED
from train_jobs.run_log import EVENTS, METRICS, RunSummary

_POLL_S = 0.2
_DRIVER_POLL_S = 2.0


class Tail:
    """The lines that a log gains, each once."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name
        self._read = 0

    def new_lines(self) -> Iterator[dict[str, Any]]:
        local = self.storage.local_path(self.name)
        if local is not None:
            if not local.exists():
                return
            with local.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        elif self.storage.exists(self.name):
            data = self.storage.read_bytes(self.name)[self._read :]
        else:
            return
        whole = data[: data.rfind(b"\n") + 1]  # a line that is being written has no end yet
        self._read += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)


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
    events, metrics = Tail(storage, EVENTS), Tail(storage, METRICS)
    pause = threading.Event()
    next_look = time.monotonic() + _DRIVER_POLL_S
    while True:
        for event in events.new_lines():
            summary.apply(event)
            view.event(event, summary)
        for line in metrics.new_lines():
            summary.step, summary.metrics = line["step"], line
            view.metric(line, summary)
        if summary.ended:
            return None
        if time.monotonic() >= next_look:
            status = driver_status()
            if status in RAY_ENDED:
                # What the driver wrote last may have come after our last look.
                for event in events.new_lines():
                    summary.apply(event)
                    view.event(event, summary)
                return None if summary.ended else status
            next_look = time.monotonic() + _DRIVER_POLL_S
        pause.wait(_POLL_S)
