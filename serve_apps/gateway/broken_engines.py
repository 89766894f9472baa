"""Whom an engine that breaks counts against: its version, or the request that broke it; no Ray.

A request that breaks engines breaks no third one: it is not sent on after two, and what is made of it (its
choices, its inputs) is at no more than two replicas at a time.

An engine that breaks takes the answers of all its requests with it, and only one of those may be to blame:
the one under which a second engine breaks. Until that is known, what failed is held back. Of a version that
has answered nothing yet it counts at once, since such a version may break under everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from serve_apps.gateway.backend import ReplicaLostError
from serve_apps.routing.spread import Spread

MOST_BROKEN = 2
"""Engines that may break under one request: it is never at more of them, nor sent to a third."""
VERDICT_S = 30.0
"""After so long failures count even where a request that saw them has not ended yet."""


@dataclass
class _Break:
    """An engine that broke, and what failed with it."""

    version: str
    since: float
    watched: int = 0
    """Requests that saw it and have not ended."""
    failures: int = 0
    counted: int = 0
    """Those of them that count against the version already."""
    excused: bool = False
    """A request is to blame."""


class BrokenEngines:
    """The engines that broke lately.

    Args:
        count: adds failed answers to a version's, or takes them back (below 0).
        clock: seconds, of any steady clock.
    """

    def __init__(
        self, count: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count = count
        self._clock = clock
        self._breaks: dict[str, _Break] = {}

    def settle(self) -> None:
        """Count what has waited for long enough."""
        now = self._clock()
        for engine, each in list(self._breaks.items()):
            if now - each.since >= VERDICT_S:
                self._count_all(each)
                if not each.watched:
                    del self._breaks[engine]

    def saw(self, engine: str, version: str, *, at_once: bool, first: bool) -> None:
        """An answer of a version failed with an engine; `first` of its request's."""
        each = self._breaks.setdefault(engine, _Break(version, self._clock()))
        each.watched += first
        each.failures += 1
        if at_once:
            self._count_all(each)

    def excuse(self, engine: str) -> None:
        """What failed with an engine counts against nobody but the request that broke it."""
        each = self._breaks[engine]
        each.excused = True
        if each.counted:
            self._count(each.version, -each.counted)
            each.counted = 0

    def ended(self, engine: str) -> None:
        """A request that saw an engine break has ended."""
        each = self._breaks[engine]
        each.watched -= 1
        if not each.watched:
            self._count_all(each)
            if not each.excused:  # others may see it a moment after the one that is to blame
                del self._breaks[engine]

    def _count_all(self, each: _Break) -> None:
        left = 0 if each.excused else each.failures - each.counted
        if left:
            self._count(each.version, left)
            each.counted += left


class Suspect:
    """One request, and the engines that broke under it; `end` is to be called when it has ended.

    Args:
        parts: requests to replicas that are made of it. One alone is at one replica at a time anyway.
    """

    def __init__(self, broken: BrokenEngines, parts: int) -> None:
        self._broken = broken
        self._engines: set[str] = set()
        self._spread = Spread(MOST_BROKEN) if parts > 1 else None

    @property
    def guilty(self) -> bool:
        """Whether so many engines broke under it that it must be the reason."""
        return len(self._engines) >= MOST_BROKEN

    @contextmanager
    def sending(self, number: int, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """A part of the request, as it is to be sent, while it is or waits to be at a replica."""
        if self._spread is None:
            yield dict(request)
            return
        broke = False
        try:
            yield {**request, **self._spread.part(number)}
        except ReplicaLostError as lost:
            broke = lost.broken is not None
            raise
        finally:
            self._spread.left(number, broke=broke)

    def saw(self, engine: str, version: str, *, at_once: bool) -> None:
        """An engine of a version broke while it answered a part of the request.

        Args:
            at_once: the failure counts now, and is taken back should the request turn out to be the reason.
        """
        self._broken.saw(engine, version, at_once=at_once, first=engine not in self._engines)
        self._engines.add(engine)
        if self.guilty:
            for each in self._engines:
                self._broken.excuse(each)

    def end(self) -> None:
        """No more engines can break under it."""
        for engine in self._engines:
            self._broken.ended(engine)
        self._engines.clear()
        if self._spread is not None:
            self._spread.close()
