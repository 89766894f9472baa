"""How long units take from the want to where they run, part by part; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.sharing.demand import Kind

PARTS = {
    "decision": "until {giver} was told to leave",
    "way_out": "until {giver} had left",
    "grant": "until the grant",
    "start": "until it {runs}",
}
"""What each part ends with, in order; those that there were not are left out."""
_KEPT_S = 600.0
"""A place that nobody has taken by then was given up for nobody."""
_RUNS = {"training": "steps", "serving": "answers"}
_NEWEST = {"training": "worker", "serving": "replica"}


@dataclass(frozen=True)
class HandOver:
    """A unit that runs now.

    Attributes:
        giver: whose place it has; None: it was free.
        node: as people name it.
        parts: seconds, by the names of PARTS.
    """

    holder: str
    kind: Kind
    giver: str | None
    node: str
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """From the want to where it runs."""
        return sum(self.parts.values())

    def sentence(self, called: Callable[[str], str] = str) -> str:
        """What happened, and what of it took how long.

        Args:
            called: what to call a holder.
        """
        words = {"giver": called(self.giver or ""), "runs": _RUNS[self.kind]}
        parts = ", ".join(f"{s:.1f} s {PARTS[name].format(**words)}" for name, s in self.parts.items())
        one = f"a {_NEWEST[self.kind]} of {called(self.holder)}"
        return f"{one} came on {self.node} {self.seconds:.1f} s after the want: {parts}"

    def as_json(self) -> dict[str, Any]:
        parts = {name: round(seconds, 3) for name, seconds in self.parts.items()}
        return {"from": self.giver, "node": self.node, "seconds": round(self.seconds, 3), "parts": parts}


@dataclass
class _Vacancy:
    """A unit's place that a holder leaves: for one of others, or (None) since it asks for less."""

    giver: str
    takers: Collection[str] | None
    node: str
    told: float
    left: float | None = None


@dataclass(frozen=True)
class _Granted:
    """A unit that was granted, and does not run yet."""

    holder: str
    node: str
    wanted: float
    granted: float
    place: _Vacancy | None


@dataclass(frozen=True)
class Saying:
    """What a holder says, and what it is told then. Units are counted by node.

    Attributes:
        most: units that it would take.
        before, after: what it was told before, and is told now.
        held, running: what it says that it has, and what of that is not being started; as of now.
        by: to whom it gives way.
    """

    holder: str
    kind: Kind
    most: int
    before: Counter[str]
    after: Counter[str]
    held: Counter[str]
    running: Counter[str]
    by: Collection[str] = ()


@dataclass
class HandOvers:
    """Follows units from hand to hand, by what holders say and are told."""

    _wanted: dict[str, float] = field(default_factory=dict)
    """Since when a holder would take more than it has."""
    _places: list[_Vacancy] = field(default_factory=list)
    _granted: list[_Granted] = field(default_factory=list)
    _held: dict[str, Counter[str]] = field(default_factory=dict)
    _running: dict[str, Counter[str]] = field(default_factory=dict)

    def hear(self, word: Saying, now: float) -> list[HandOver]:
        """Take in what a holder says; the units of it that run now, and did not before."""
        holder = word.holder
        if word.most > word.before.total():
            self._wanted.setdefault(holder, now)
        lost, won = word.before - word.after, word.after - word.before
        self._leave(word, now)
        self._places = [place for place in self._places if now - place.told < _KEPT_S]
        self._places += [_Vacancy(holder, word.by or None, node, now) for node in lost.elements()]
        for node in lost.elements():
            self._forget(holder, node)
        for node in won.elements():
            if self._stays_after_all(holder, node):
                continue
            place = self._place_for(holder, node)
            wanted = self._wanted.get(holder, now)
            if place is not None:
                # Who would always take more has waited for nothing before there was a place.
                wanted = place.told if place.takers is None else min(wanted, place.told)
            self._granted.append(_Granted(holder, node, wanted, now, place))
        if word.most <= word.after.total():
            self._wanted.pop(holder, None)
        come = word.running - self._running.get(holder, Counter())
        self._held[holder], self._running[holder] = word.held, word.running
        return [found for node in come.elements() if (found := self._came(word, node, now)) is not None]

    def release(self, holder: str) -> None:
        """A holder is gone, with all that it had."""
        for known in (self._wanted, self._held, self._running):
            known.pop(holder, None)
        self._granted = [each for each in self._granted if each.holder != holder]

    def _leave(self, word: Saying, now: float) -> None:
        gone = self._held.get(word.holder, Counter()) - word.held
        for place in (each for each in self._places if each.left is None):
            if place.giver == word.holder and gone[place.node] > 0:
                gone[place.node] -= 1
                place.left = now
            elif place.giver not in self._held:  # its lease has ended
                place.left = now

    def _stays_after_all(self, holder: str, node: str) -> bool:
        """It was told to leave a place, is told now that it may stay, and has not left."""
        for place in self._places:
            if (place.giver, place.node, place.left) == (holder, node, None):
                self._places.remove(place)
                return True
        return False

    def _place_for(self, holder: str, node: str) -> _Vacancy | None:
        """The place that a unit takes which is granted there; it is a vacancy no more."""
        left = [place for place in self._places if place.node == node and place.left is not None]
        # An older one may have been filled by somebody of whom nothing was known.
        for place in reversed(left):
            if place.giver != holder and (place.takers is None or holder in place.takers):
                self._places.remove(place)
                return place
        # It left for somebody who does not want it after all, and has it again; or another has it.
        own = [place for place in left if place.giver == holder]
        for place in (own or left)[:1]:
            self._places.remove(place)
        return None

    def _came(self, word: Saying, node: str, now: float) -> HandOver | None:
        granted = self._waiting(word.holder, node)
        if granted is None:
            return None  # it ran before it was heard of
        self._granted.remove(granted)
        place, parts = granted.place, dict[str, float]()
        if place is not None and place.left is not None:
            if place.takers is not None:
                parts["decision"] = place.told - granted.wanted
            parts["way_out"] = place.left - place.told
            parts["grant"] = granted.granted - place.left
        else:
            parts["grant"] = granted.granted - granted.wanted
        parts["start"] = now - granted.granted
        return HandOver(word.holder, word.kind, place.giver if place else None, node, parts)

    def _forget(self, holder: str, node: str) -> None:
        """One that was granted there is not any more."""
        granted = self._waiting(holder, node)
        if granted is not None:
            self._granted.remove(granted)

    def _waiting(self, holder: str, node: str) -> _Granted | None:
        return next((each for each in self._granted if (each.holder, each.node) == (holder, node)), None)
