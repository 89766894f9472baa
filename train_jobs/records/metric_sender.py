"""The lines of a rank's steps on their way to the job's control, one after the other."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

import ray

from cluster.actors.named_actor import NamedActor
from cluster.errors import ShoalError

MOST_KEPT = 50_000
"""Lines that are kept while the storage does not take them."""


class MetricSender:
    """Sends a line only when the one before is answered: control logs none that is not beyond its last.

    What was on its way to an actor that has died Ray sends again to the one that it starts in its place, in
    any order (so in Ray 2.60; `tests/train_jobs/records/test_metric_sender.py`).

    What is answered may not be written yet, where the storage cannot append or is in trouble. Lines are kept
    until they are written, and sent again to the next control.
    """

    def __init__(self) -> None:
        self._control: NamedActor | None = None
        self._answer: ray.ObjectRef | None = None
        """To what was sent last."""
        self._unwritten: deque[dict[str, Any]] = deque(maxlen=MOST_KEPT)
        self._life: str | None = None
        """Of the control that has the lines."""

    def send(self, control: NamedActor, line: dict[str, Any], timeout_s: float) -> bool:
        """Send a line without waiting for its answer; whether the job is to stop, as the answer to the line
        before says.

        That is as old as a whole step: it is waited for only where control cannot keep up with the steps.

        Raises:
            ray.exceptions.RayError: control is gone for good, or does not answer in time.
        """
        self._control = control
        stop = self._hear(timeout_s)
        self._unwritten.append(line)
        self._send([line])
        return stop

    def finish(self, timeout_s: float) -> None:
        """Wait until the last line is answered, if control is there: Ray repeats nothing for a process that
        has ended."""
        with suppress(ray.exceptions.RayError, ShoalError):
            self._hear(timeout_s)

    def _hear(self, timeout_s: float) -> bool:
        """Wait until control has what was sent, and all before that; whether the job is to stop."""
        stop = False
        while (answer := self._answer) is not None:
            self._answer = None
            said = ray.get(answer, timeout=timeout_s)
            stop, self._life = said["stop"], said["life"]
            if not said["taken"]:
                self._send(list(self._unwritten))
                continue
            while len(self._unwritten) > said["unwritten"]:
                self._unwritten.popleft()
        return stop

    def _send(self, lines: list[dict[str, Any]]) -> None:
        assert self._control is not None
        self._answer = self._control.find().metrics.remote(lines, self._life)
