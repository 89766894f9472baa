"""Whether a rank still gets on: what it counts, and what whoever watches it makes of that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Activity:
    """What a rank says of itself.

    Attributes:
        count: of what it has done; a micro-batch or a step is one.
        phase: what it does that may take longer than a micro-batch ("starting"); None while it steps.
        limit_s: how long that may take; infinite where only the user can tell.
        collectives: how many collectives it has begun; None where nobody counts. No progress by themselves.
        saves: whether it writes to the storage, whatever else it is at.
    """

    count: int
    phase: str | None = None
    limit_s: float = 0.0
    collectives: int | None = field(default=None, compare=False)
    saves: bool = field(default=False, compare=False)


class Progress:
    """A rank's own count of what it has done, and what it is at.

    Args:
        start_s: longest that its start may take, and a wait for other groups, which may have to start.
        save_s: longest that a checkpoint or the model may take to be written.

    Attributes:
        collectives: counts those that it has begun.
        others_save: another group has said that it writes to the storage. Who waits for it does so for as
            long as that takes: whoever watches that group itself sees to its limit.
    """

    def __init__(self, start_s: float = math.inf, save_s: float = math.inf) -> None:
        self.start_s = start_s
        self.save_s = save_s
        self.collectives: Callable[[], int | None] = lambda: None
        self.others_save = False
        self._count = 0
        self._phases: list[tuple[str, float]] = []

    def tick(self) -> None:
        """One thing more is done."""
        self._count += 1

    def starting(self) -> AbstractContextManager[None]:
        """While it fetches, builds, restores and compiles."""
        return self._phase("starting", self.start_s)

    def meeting(self) -> AbstractContextManager[None]:
        """While it waits for other groups."""
        return self._phase("waiting for other groups", self.start_s)

    def exchanging(self) -> AbstractContextManager[None]:
        """While it waits for other groups in a step: a phase only where one of them saves."""
        return self._phase(_EXCHANGING, math.inf)

    def saving(self) -> AbstractContextManager[None]:
        """While it writes to the storage."""
        return self._phase(_SAVING, self.save_s)

    def waiting(self) -> AbstractContextManager[None]:
        """While something runs of which only the user knows how long it takes."""
        return self._phase("waiting", math.inf)

    @contextmanager
    def _phase(self, name: str, limit_s: float) -> Iterator[None]:
        self._phases.append((name, limit_s))
        try:
            yield
        finally:
            self._phases.pop()
            self._count += 1

    @property
    def saves(self) -> bool:
        """Whether it writes to the storage."""
        return any(name == _SAVING for name, _ in self._phases.copy())

    @property
    def activity(self) -> Activity:
        phases = [each for each in self._phases.copy() if each[0] != _EXCHANGING or self.others_save]
        # Of phases within one another the one that may take longest counts.
        phase, limit_s = max(phases, key=lambda each: each[1], default=(None, 0.0))
        return Activity(self._count, phase, limit_s, self.collectives(), self.saves)


_SAVING = "saving"
_EXCHANGING = "waiting for a group that saves"


class HangWatch:
    """Tells when a rank hangs, from its activity, as it tells it.

    Args:
        timeout_s: longest time without progress while it steps, and without a word.
        began: when the rank was started; `now` of the other methods is of the same clock.
        first_word_s: longest time until its first word, where that is longer.
    """

    def __init__(self, timeout_s: float, began: float, first_word_s: float) -> None:
        self.timeout_s = timeout_s
        self.first_word_s = max(timeout_s, first_word_s)
        self._began = began
        self._last: Activity | None = None
        self._heard_at = 0.0
        self._progress_at = 0.0

    def heard(self, activity: Activity, now: float) -> None:
        """Take in what it is at; `now` in seconds of a clock that only goes forward."""
        self._heard_at = now
        if activity != self._last:
            self._progress_at = now
        self._last = activity

    @property
    def collectives(self) -> int | None:
        """How many collectives the rank had begun, as it has said last."""
        return None if self._last is None else self._last.collectives

    @property
    def phase(self) -> str | None:
        """What the rank is at, as it has said last; None while it steps."""
        return None if self._last is None else self._last.phase

    @property
    def saves(self) -> bool:
        """Whether the rank writes to the storage, as it has said last."""
        return self._last is not None and self._last.saves

    def hang(self, now: float) -> str | None:
        """What is wrong, without the subject; None while nothing is."""
        last = self._last
        if last is None:
            silent = now - self._began
            return f"has not said a word for {silent:.1f} s" if silent > self.first_word_s else None
        if now - self._heard_at > self.timeout_s:
            return f"has said nothing for {now - self._heard_at:.1f} s"
        idle = now - self._progress_at
        if last.phase is None:
            return f"has done nothing for {idle:.1f} s" if idle > self.timeout_s else None
        limit_s = max(last.limit_s, self.timeout_s)
        return f"has been {last.phase} for {idle:.1f} s" if idle > limit_s else None
