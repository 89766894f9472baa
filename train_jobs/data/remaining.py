"""How far work is, and how long the rest of it will take."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.wording import lasting

LOOK_S = 5.0
"""After so many seconds it is known how long the rest will take."""


class RemainingWork:
    """What is left of work whose end is known.

    Attributes:
        took_s: since it was first told where the work is: what starts for it is none of the work.
        rest_s: how long the rest will take.
        share: of the work that is done.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self.took_s = self.rest_s = self.share = 0.0

    def at(self, done: int, whole: int) -> None:
        """So much of the whole is done by now."""
        now = self._clock()
        begun, before = self._first = self._first or (now, done)
        self.took_s, self.share = now - begun, done / max(1, whole)
        self.rest_s = self.took_s / max(1, done - before) * (whole - done)

    @property
    def is_known(self) -> bool:
        return self.took_s >= LOOK_S

    @property
    def left(self) -> str:
        """` (40%, about 3 min left)`, behind a sentence; nothing as long as that is not known."""
        if not self.is_known or self.share >= 1:
            return ""
        return f" ({self.share:.0%}, about {lasting(self.rest_s)} left)"
