"""A job that trains while something else is measured: with how many workers, and that it goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from cluster.errors import ShoalError
from cluster.files.line_reader import LineReader
from cluster.files.storage import Storage
from train_jobs.records.run_log import EVENTS, METRICS

_LOOK_S = 0.1
_EVENTS_TOLD = 5


class JobWatch:
    """Reads what a job writes, as it comes.

    Args:
        run: the job's directory in the storage.
        timeout_s: how long what is waited for may take.
    """

    def __init__(self, run: Storage, timeout_s: float = 150.0) -> None:
        self.timeout_s = timeout_s
        self._events, self._metrics = LineReader(run, EVENTS), LineReader(run, METRICS)
        self._world_size = 0
        self._newest: deque[dict[str, Any]] = deque(maxlen=_EVENTS_TOLD)

    @property
    def world_size(self) -> int:
        """Of the job's last step; 0 before the first."""
        for line in self._metrics.new():
            self._world_size = line["world_size"]
        return self._world_size

    def until_workers(self, workers: int) -> None:
        """Wait until the job steps with so many workers.

        Raises:
            ShoalError: it did not in time.
        """
        self.until(lambda: self.world_size == workers, f"the job did not step with {workers} workers")

    def until(
        self, condition: Callable[[], bool], otherwise: str, seen: Callable[[], Sequence[str]] = tuple
    ) -> None:
        """Wait until a condition holds.

        Args:
            otherwise: what is the case where it does not.
            seen: what else there is to say then.

        Raises:
            ShoalError: it did not hold in time, or the job has ended.
        """
        deadline, pause = time.monotonic() + self.timeout_s, threading.Event()
        while not condition():
            for event in self._new_events():
                if event["kind"] == "finished":
                    raise ShoalError(f"{otherwise}: it has {event['status']} ({event['error']})")
            if time.monotonic() >= deadline:
                said = "; ".join([*seen(), *self._so_far(), *_explained()])
                raise ShoalError(f"{otherwise} within {self.timeout_s:.0f} s: {said}")
            pause.wait(_LOOK_S)

    def _new_events(self) -> list[dict[str, Any]]:
        found = self._events.new()
        self._newest.extend(found)
        return found

    def _so_far(self) -> list[str]:
        """How far the job has come."""
        told = [
            f"{each['kind']} ({each['reason']})" if each.get("reason") else each["kind"]
            for each in self._newest
        ]
        return [f"its newest step had {self.world_size} workers", f"its newest events: {', '.join(told)}"]

    def pause(self, seconds: float) -> None:
        """Let time pass, while the job goes on.

        Raises:
            ShoalError: it has ended.
        """
        ended = time.monotonic() + seconds
        while (left := ended - time.monotonic()) > 0:
            threading.Event().wait(min(left, _LOOK_S))
            for event in self._new_events():
                if event["kind"] == "finished":
                    raise ShoalError(f"the job has {event['status']} ({event['error']})")


def _explained() -> list[str]:
    """Why job and app have what they have."""
    from cluster.sharing.client import BrokerClient  # takes Ray with it

    try:
        broker = BrokerClient()
        explained = [broker.explain(lease["holder"]) for lease in broker.leases()]
        return [row["text"] for row in explained if row is not None]
    except ShoalError as error:  # which may be why
        return [str(error)]
