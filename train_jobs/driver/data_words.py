"""What a person hears of how far a job's data is: some of what is told, and how long nothing else was."""

from __future__ import annotations

from cluster.wording import lasting
from train_jobs.data import preparation

STILL_S = 5.0
"""Words that are the last for so long are said again, with how long they have been."""


class DataWords:
    """Chooses what is said; the time is given.

    Args:
        now: when the work begins, in seconds of any clock.
    """

    def __init__(self, now: float) -> None:
        self._next = now + preparation.FIRST_WORD_S
        self._last = ""
        self._since = now

    def hear(self, words: str, now: float) -> str | None:
        """What is to be said of new words; None: nothing yet."""
        if words != self._last:
            self._last, self._since = words, now
        return self._say(words, now)

    def look(self, now: float) -> str | None:
        """What is to be said where nothing was told."""
        still_s = now - self._since
        if not self._last or still_s < STILL_S:
            return None
        return self._say(f"{self._last}, for {lasting(still_s)} now", now)

    def _say(self, words: str, now: float) -> str | None:
        if now < self._next:
            return None
        self._next = now + preparation.WORD_S
        return words
