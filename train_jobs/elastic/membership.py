"""Which groups of a job take part, agreed on at step boundaries; no Ray, no clock.

The agreed set is a view, as in virtual synchrony (Birman and Joseph, SOSP 1987): whoever is in it has
installed it before the first collective of it begins, and a group that is lost ends it for all.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

PATIENCE_S = 120.0
"""Groups that start together are ready within seconds of each other, unless one cannot start at all."""
_BEATS_PER_TIMEOUT = 4


def heartbeat_period_s(timeout_s: float) -> float:
    """How often a rank is to be heard, where it counts as lost after a silence of so long."""
    return timeout_s / _BEATS_PER_TIMEOUT


class Standing(NamedTuple):
    """How far the state of a group has come; the others take the greatest.

    Attributes:
        began: the number of the view in which it was last read from a checkpoint, or made: by all groups,
            when none had a state. What was done before counts for nothing then.
        went_back: how often the job went back to a checkpoint by itself: the same.
        step: steps done.
    """

    began: int
    went_back: int
    step: int


NO_STATE = Standing(-1, -1, -1)
"""That of a group that has neither restored a checkpoint nor taken a peer's state."""


@dataclass(frozen=True)
class View:
    """One agreement.

    Attributes:
        number: counts from 1; a later view replaces all before it.
        groups: who takes part, the longest-standing first. The first one writes logs and checkpoints.
        standings: how far each of them has come, in the same order; NO_STATE where it has no state.
        lost: groups of the view before that ended without a word.
        left: groups of the view before that said goodbye.
    """

    number: int
    groups: tuple[str, ...]
    standings: tuple[Standing, ...]
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def standing(self) -> Standing:
        """Of those who have come furthest: there the others take their state."""
        return max(self.standings)

    @property
    def current(self) -> tuple[str, ...]:
        """The groups that have the newest state."""
        standings = zip(self.groups, self.standings, strict=True)
        return tuple(group for group, standing in standings if standing == self.standing)

    def source(self, group: str) -> str | None:
        """From whom a group takes its state; None where it has the newest, or nobody has any."""
        behind = [each for each in self.groups if each not in self.current]
        return self.current[behind.index(group) % len(self.current)] if group in behind else None

    def receivers(self, group: str) -> tuple[str, ...]:
        """The groups that take their state from this one."""
        return tuple(each for each in self.groups if self.source(each) == group)


@dataclass(frozen=True)
class Goodbye:
    """The answer to a group that leaves.

    Attributes:
        last: nobody goes on without it, so that it has to save.
    """

    last: bool


@dataclass(frozen=True)
class Word:
    """The answer to a heartbeat.

    Attributes:
        change: the next step needs a new view.
        broken: collectives of the rank's view will not end; who waits in one gives up.
        forgotten: the asker's view is not known here (whoever kept it died); it should be told again.
        saves: a group of the view writes to the storage; who waits for the others waits for that.
    """

    change: bool = False
    broken: bool = False
    forgotten: bool = False
    saves: bool = False


class Beat(NamedTuple):
    """A heartbeat.

    Attributes:
        view: number of the view that the rank is in; 0 where it is in none yet.
        age_s: how long ago it was sent.
        saves: whether the rank writes to the storage.
    """

    group: str
    rank: int
    view: int
    age_s: float = 0.0
    saves: bool = False


@dataclass(frozen=True)
class _Outlook:
    """What has become of the view, which holds until something changes.

    Attributes:
        word: the answer to a heartbeat of a rank in it.
        until: from then on a rank may have been silent for too long.
    """

    word: Word
    until: float


@dataclass
class _Member:
    ranks: dict[int, float] = field(default_factory=dict)
    """When each rank was last heard of."""
    saving: set[int] = field(default_factory=set)
    """The ranks that have said that they write to the storage."""
    arrived: Standing | None = None
    """How far it has come, while it waits for a view."""
    leaving: bool = False
    since: int | None = None
    """Orders groups by when they first took part."""


class Membership:
    """Who is there, who waits, who goes; decides on the next view.

    Times are seconds of any clock that does not go backwards.

    Args:
        expected: groups that are being started; the first view waits for all of them. None: that is said
            later, see `expect`, and there is no view before.
        timeout_s: a group is lost when one of its ranks has been silent for so long.
        patience_s: how long the first group to arrive waits for the others that are expected.
    """

    def __init__(
        self, expected: Collection[str] | None, timeout_s: float, patience_s: float = PATIENCE_S
    ) -> None:
        self.timeout_s = timeout_s
        self.patience_s = patience_s
        self.view: View | None = None
        self._expected = None if expected is None else set(expected)
        self._groups: dict[str, _Member] = {}
        self._ended: set[str] = set()
        self._left: set[str] = set()
        self._seniority = 0
        self._first_arrival: float | None = None
        self._outlook: _Outlook | None = None
        """None where something has changed since it was looked at."""

    def expect(self, groups: Collection[str]) -> None:
        """Say which groups are being started, where that was not known."""
        if self._expected is None:
            self._expected = set(groups) - self._ended

    def heard(self, beat: Beat, now: float) -> Word:
        """Take in a heartbeat of a rank. It costs the same however many ranks there are."""
        group = beat.group
        if group in self._ended or group in self._left:
            return Word(broken=group in self._ended)
        member = self._groups.setdefault(group, _Member())
        before, sent = member.ranks.get(beat.rank, -math.inf), now - beat.age_s
        if now - before > self.timeout_s:
            self._outlook = None  # it was thought lost, or is new
        if sent >= before and beat.saves != (beat.rank in member.saving):
            self._outlook = None
            member.saving ^= {beat.rank}
        member.ranks[beat.rank] = max(before, sent)
        if self.view is None:
            return Word(forgotten=beat.view > 0)
        word = self._word(now)
        if beat.view == 0:
            return Word(saves=word.saves)
        if beat.view != self.view.number or group not in self.view.groups:
            return Word(change=word.change, broken=True, saves=word.saves)
        return word

    def remind(self, view: View, now: float) -> None:
        """Tell of a view that was agreed on before this began; its groups have to be heard from now on."""
        if self.view is None or view.number > self.view.number:
            self.view = view
            self._outlook = None
            for group in view.groups:
                member = self._groups.setdefault(group, _Member())
                member.ranks.setdefault(0, now)
                self._seniority += 1
                member.since = self._seniority

    def arrive(self, group: str, standing: Standing, rank_count: int, now: float) -> None:
        """A group stands at a step boundary and waits for an answer.

        Args:
            standing: how far it has come, or NO_STATE.
            rank_count: its ranks; all of them are there.
        """
        if group in self._ended or group in self._left:
            return
        self._outlook = None
        member = self._groups.setdefault(group, _Member())
        for rank in range(rank_count):
            member.ranks[rank] = now
        member.arrived = standing
        if self._first_arrival is None:
            self._first_arrival = now

    def answer(self, group: str, standing: Standing, now: float) -> View | Goodbye | None:
        """What a group that has arrived is told; None while it has to wait."""
        if group in self._ended or group in self._left:
            return Goodbye(last=False)
        member = self._groups.get(group)
        if member is None:
            return None  # it was silent, and is thought lost until it is heard again
        if member.leaving:
            self._outlook = None
            others = self.view is not None and any(
                self._present(each, now) for each in self.view.groups if each != group
            )
            del self._groups[group]
            self._left.add(group)
            return Goodbye(last=not others)
        if member.arrived is None:
            if self.view is not None and group in self.view.groups:
                return self.view
            self._outlook = None
            member.arrived = standing  # it was thought lost while it waited
        return None

    def leave(self, group: str) -> None:
        """Ask a group to go; at its next step boundary it is answered with a goodbye."""
        self._outlook = None
        self._groups.setdefault(group, _Member()).leaving = True

    def ended(self, group: str) -> None:
        """A group is over, however that came."""
        self._outlook = None
        if self._expected is not None:
            self._expected.discard(group)
        self._groups.pop(group, None)
        self._ended.add(group)

    def decide(self, now: float) -> View | None:
        """The next view, once everybody who goes on waits for it."""
        if self._somebody_is_missing(now):
            return None
        waiting = {
            name: group
            for name, group in self._groups.items()
            if self._waits(name) and self._heard(group, now)
        }
        if not waiting:
            return None
        for name in sorted(waiting):
            if waiting[name].since is None:
                self._seniority += 1
                waiting[name].since = self._seniority
        groups = sorted(waiting, key=lambda name: waiting[name].since or 0)
        standings = tuple(each for name in groups if (each := waiting[name].arrived) is not None)
        gone = [] if self.view is None else [name for name in self.view.groups if name not in waiting]
        left = [name for name in gone if name in self._left or self._leaves(name)]
        lost = [name for name in gone if name not in left]
        for name in lost:
            self._groups.pop(name, None)  # it may come back, as one that has yet to join
        number = 1 if self.view is None else self.view.number + 1
        self.view = View(number, tuple(groups), standings, tuple(lost), tuple(left))
        self._outlook = None
        for group in waiting.values():
            group.arrived = None
        return self.view

    def _somebody_is_missing(self, now: float) -> bool:
        """Whether one that goes on does not wait for the next view yet."""
        if self.view is not None:
            # Whether it waits is known at once; whether it is there, only when all its ranks are looked at.
            return any(not self._waits(name) and self._present(name, now) for name in self.view.groups)
        if self._expected is None:
            return True
        if self._first_arrival is None or now - self._first_arrival > self.patience_s:
            return False
        going = {name for name in self._expected if name in self._left or self._leaves(name)}
        return any(not (self._waits(name) and self._present(name, now)) for name in self._expected - going)

    def _waits(self, name: str) -> bool:
        """Whether a group stands at a step boundary, to go on from there."""
        member = self._groups.get(name)
        return member is not None and member.arrived is not None and not member.leaving

    def _leaves(self, name: str) -> bool:
        return name in self._groups and self._groups[name].leaving

    def _present(self, name: str, now: float) -> bool:
        """Whether a member of the view goes on."""
        member = self._groups.get(name)
        return member is not None and not member.leaving and self._heard(member, now)

    def _heard(self, group: _Member, now: float) -> bool:
        return all(now - heard <= self.timeout_s for heard in group.ranks.values())

    def _word(self, now: float) -> Word:
        """The answer to a heartbeat of the view's own ranks."""
        if self._outlook is None or now > self._outlook.until:
            self._outlook = self._look(now)
        return self._outlook.word

    def _look(self, now: float) -> _Outlook:
        assert self.view is not None, "there is a view"
        members = [(name, self._groups.get(name)) for name in self.view.groups]
        # Who has neither said goodbye nor been heard of is lost.
        lost = any(
            name not in self._left and (member is None or not self._heard(member, now))
            for name, member in members
        )
        joins = any(
            group.arrived is not None and name not in self.view.groups for name, group in self._groups.items()
        )
        change = lost or joins or any(member is None or member.leaving for _, member in members)
        heard = [last for _, member in members if member is not None for last in member.ranks.values()]
        until = min(
            (last + self.timeout_s for last in heard if now - last <= self.timeout_s), default=math.inf
        )
        saves = any(member.saving and self._heard(member, now) for _, member in members if member is not None)
        return _Outlook(Word(change=change, broken=lost, saves=saves), until)
