"""Which shards are in the engine side by side, and which has it to itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedLock:
    """Lets threads in together, or one alone; who wants to be alone waits until nobody is inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._taken = False

    @contextmanager
    def enter(self, *, alone: bool) -> Iterator[None]:
        """Be inside, after as long a wait as it takes."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken and not (alone and self._inside))
            self._inside += 1
            self._taken = alone
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._taken = False
                self._changed.notify_all()
