"""What ranks tell each other of their speed, along with the totals of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from train_jobs.metering.forward_clock import ForwardClock
from train_jobs.metering.stragglers import Change, Rank, StragglerWatch


class Pace:
    """One rank's time for a micro-batch, and the comparison of all of them.

    A micro-batch is as large on every rank, however many of them a rank takes. Its time is that of a forward
    pass, and of waiting for its data. What a rank tells is the time of its step before: that of a GPU is
    known only when the device was waited for, which the totals do anyway.

    Args:
        waited_s: seconds that steps have waited for data so far.
        watches: whether this rank compares.
    """

    def __init__(
        self, clock: ForwardClock, waited_s: Callable[[], float], factor: float, watches: bool
    ) -> None:
        self.clock = clock
        self._waited_s = waited_s
        self._waited = waited_s()
        self._watch = StragglerWatch(factor) if watches else None
        self._mine = 0.0

    def row(self, index: int, size: int) -> list[float]:
        """What this rank adds to the totals: its seconds at its place, zeros at those of the others."""
        row = [0.0] * size
        row[index] = self._mine
        return row

    def take_in(self, ranks: Sequence[Rank], seconds: Sequence[float], micro_batches: int) -> list[Change]:
        """After the totals of a step; what they tell of stragglers.

        Args:
            seconds: the sum of all rows.
            micro_batches: of this rank in the step.
        """
        forward, waited = self.clock.take(), self._waited_s()
        known = forward > 0 and micro_batches > 0
        self._mine = forward + (waited - self._waited) / micro_batches if known else 0.0
        self._waited = waited
        return [] if self._watch is None else self._watch.observe(ranks, seconds)
