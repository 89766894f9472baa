"""Which ranks are slower than the others, and since when they are not any more. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW_STEPS = 12
"""A rank is judged by so many steps."""
_DROPPED = 2
"""Of them, those in which it was slowest do not count: a pause of once in a while makes no straggler."""
_EVERY_STEPS = 4
"""One step in so many judges: a straggler is named within WINDOW_STEPS + _EVERY_STEPS steps."""

Rank = tuple[str | None, int]
"""A rank's group (None where there is one group) and its number in it."""


@dataclass(frozen=True)
class Change:
    """A rank has begun to straggle, or does so no more.

    Attributes:
        begins: which of the two.
        times_slower: than the median of the other ranks; None where the rank has gone.
        steps: over which that was measured; at the end, for which it was a straggler.
    """

    rank: Rank
    begins: bool
    times_slower: float | None
    steps: int


class StragglerWatch:
    """Compares the time that ranks take for a micro-batch.

    What a rank is compared with is the median of the *others*, the lower one of two: of two ranks that is the
    other one, so that the slower is named whenever it is slower by the factor; of any number, stragglers are
    found as long as they are not more than half. A rank is named when it is slower by the factor, and no
    longer when it is slower by less than half of what the factor adds.

    Args:
        factor: above 1.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._over_below = (1.0 + factor) / 2
        self._ranks: Sequence[Rank] = ()
        self._times: deque[np.ndarray] = deque(maxlen=WINDOW_STEPS)
        self._steps = 0
        self._since: dict[Rank, int] = {}

    def observe(self, ranks: Sequence[Rank], seconds: Sequence[float]) -> list[Change]:
        """Take in a step.

        Args:
            ranks: those that took part.
            seconds: that each took for a micro-batch; 0 where it took none.

        Returns:
            what changed with this step.
        """
        if ranks != self._ranks:
            self._arrange(ranks)
        self._times.append(np.asarray(seconds, dtype=np.float64))
        self._steps += 1
        gone = [rank for rank in self._since if rank not in ranks] if self._since else []
        changes = [Change(rank, False, None, self._steps - self._since.pop(rank)) for rank in gone]
        if len(self._times) == WINDOW_STEPS and self._steps % _EVERY_STEPS == 0:
            changes += self._judge()
        return changes

    def _judge(self) -> list[Change]:
        times = np.stack(self._times)
        known = np.flatnonzero((times > 0).all(axis=0))
        if len(known) < 2:
            return []
        taken = np.sort(times[:, known], axis=0)[:-_DROPPED].sum(axis=0)
        slower = taken / _median_of_others(taken)

        def where(mask: np.ndarray) -> dict[Rank, float]:
            return {self._ranks[known[index]]: round(float(slower[index]), 2) for index in mask.nonzero()[0]}

        slow = where(slower >= self.factor)
        begun = {rank: by for rank, by in slow.items() if rank not in self._since}
        over: dict[Rank, float] = {}
        if self._since:
            fast = where(slower < self._over_below)
            over = {rank: by for rank, by in fast.items() if rank in self._since}
        changes = [Change(rank, True, by, WINDOW_STEPS) for rank, by in begun.items()]
        self._since |= dict.fromkeys(begun, self._steps)
        for rank, by in over.items():
            changes.append(Change(rank, False, by, self._steps - self._since.pop(rank)))
        return changes

    def _arrange(self, ranks: Sequence[Rank]) -> None:
        """Other ranks take part: those that stay keep what is known of them."""
        before = {rank: index for index, rank in enumerate(self._ranks)}
        places = [before.get(rank) for rank in ranks]
        rows = [[math.nan if place is None else row[place] for place in places] for row in self._times]
        self._times = deque((np.asarray(row) for row in rows), maxlen=WINDOW_STEPS)
        self._ranks = list(ranks)


def _median_of_others(values: np.ndarray) -> np.ndarray:
    """For each value the median of the others; of two in the middle the lower."""
    order = np.argsort(values, kind="stable")
    middle = (len(values) - 2) // 2  # among the others, which are one fewer
    medians = np.empty_like(values)
    # Without one from the lower part, what stood one place further stands in the middle.
    medians[order] = np.where(
        np.arange(len(values)) <= middle, values[order[middle + 1]], values[order[middle]]
    )
    return medians
