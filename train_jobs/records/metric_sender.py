"""The lines of a rank's steps on their way to the job's control, one after the other."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray

from cluster.actors.named_actor import NamedActor


class MetricSender:
    """Sends a line only when the one before is answered: control logs none that is not beyond its last.

    What was on its way to an actor that has died Ray sends again to the one that it starts in its place, in
    any order (so in Ray 2.60; `tests/train_jobs/records/test_metric_sender.py`).
    """

    def __init__(self) -> None:
        self._answer: ray.ObjectRef | None = None
        """To the line that was sent last."""

    def send(self, control: NamedActor, line: dict[str, Any], timeout_s: float) -> bool:
        """Send a line without waiting for its answer; whether the job is to stop, as the answer to the line
        before says.

        That is as old as a whole step: it is waited for only where control cannot keep up with the steps.

        Raises:
            ray.exceptions.RayError: control is gone for good, or does not answer in time.
        """
        before, self._answer = self._answer, None
        stop = before is not None and ray.get(before, timeout=timeout_s)["stop"]
        self._answer = control.find().metric.remote(line)
        return stop

    def finish(self, timeout_s: float) -> None:
        """Wait until the last line is answered, if control is there: Ray repeats nothing for a process that
        has ended."""
        before, self._answer = self._answer, None
        if before is not None:
            with suppress(ray.exceptions.RayError):
                ray.get(before, timeout=timeout_s)
