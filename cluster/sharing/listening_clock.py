"""The time for which a process could listen: what it stood still for is nobody's silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_S = 0.25
MOST_S = 1.0
"""Of a moment in which it did not listen, so much counts."""


class ListeningClock:
    """Seconds, as any monotonic clock tells them, without those in which its process could hear nobody.

    A process that is stopped, swapped out or starved does not run, and one that is busy with one call hears
    no other. Whoever is silent meanwhile may have called all the time. So time passes by looks: from one to
    the next no more than `MOST_S` passes, and none are made during a call.

    Args:
        clock: one that goes on whatever the process does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._passed = 0.0
        self._busy = False
        self._looking = threading.Lock()

    def start(self) -> None:
        """Look by itself from now on, however seldom it is asked."""
        threading.Thread(target=self._look, name="listening clock", daemon=True).start()

    def now(self) -> float:
        """The time; during a call that of its beginning."""
        with self._looking:
            if not self._busy:
                self._pass()
            return self._passed

    @contextmanager
    def call(self) -> Iterator[float]:
        """While it hears nobody else; gives the time."""
        now = self.now()
        self._busy = True
        try:
            yield now
        finally:
            with self._looking:
                self._busy = False
                self._pass()

    def _pass(self) -> None:
        now = self._clock()
        self._passed += min(now - self._last, MOST_S)
        self._last = now

    def _look(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_S):
            self.now()
