"""Whether a rank still gets on: what it counts, and what whoever watches it makes of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Heartbeat:
    """What a rank says of itself.

    Attributes:
        count: of what it has done; a micro-batch or a step is one.
        waits: it waits for something that takes as long as it takes: other groups, the storage, its start.
    """

    count: int
    waits: bool


class Progress:
    """A rank's own count of what it has done."""

    def __init__(self) -> None:
        self._count = 0
        self._waits = 0

    def tick(self) -> None:
        """One thing more is done."""
        self._count += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While the context is open, nothing need be done."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            self._count += 1

    @property
    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self._count, self._waits > 0)


class HangWatch:
    """Tells when a rank hangs, from its heartbeats.

    Args:
        timeout_s: longest time without progress, and without a heartbeat.
        began: when the rank was started; `now` of the other methods is of the same clock.
        first_word_s: longest time until its first heartbeat, where that is longer.
    """

    def __init__(self, timeout_s: float, began: float, first_word_s: float) -> None:
        self.timeout_s = timeout_s
        self.first_word_s = max(timeout_s, first_word_s)
        self._began = began
        self._last: Heartbeat | None = None
        self._heard_at = 0.0
        self._progress_at = 0.0

    def heard(self, heartbeat: Heartbeat, now: float) -> None:
        """Take in a heartbeat; `now` in seconds of a clock that only goes forward."""
        self._heard_at = now
        if heartbeat.waits or heartbeat != self._last:
            self._progress_at = now
        self._last = heartbeat

    def hang(self, now: float) -> str | None:
        """What is wrong, without the subject; None while nothing is."""
        if self._last is None:
            silent = now - self._began
            return f"has not said a word for {silent:.1f} s" if silent > self.first_word_s else None
        if now - self._heard_at > self.timeout_s:
            return f"has said nothing for {now - self._heard_at:.1f} s"
        if now - self._progress_at > self.timeout_s:
            return f"has done nothing for {now - self._progress_at:.1f} s"
        return None
