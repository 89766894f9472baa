"""Where a gang is placed, and who gives way or moves for it when there is no room."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from cluster.sharing.claims import Claim, Crowd, PlacedGang
from cluster.sharing.room import Room, Vector, fits, minus, plus, scaled

MOVES_TRIED = 8
"""Nodes on which a place is sought by moving others, the most promising first."""

Spare = tuple[int, int]
"""How many gangs a claim may lose, and how many of those that bear it."""


@dataclass
class Placer:
    """Places one gang at a time; a step that fails changes nothing.

    Attributes:
        left: the gangs that gave way since the caller emptied the list.
        last_resort: what finds no other place may have one on a node that is avoided.
    """

    room: Room
    crowd: Crowd
    left: list[PlacedGang] = field(default_factory=list)
    last_resort: bool = False
    _pinned: set[int] = field(default_factory=set)
    """Claims of which gangs leave for one that moves: by id."""
    _kept: set[int] = field(default_factory=set)
    """Nodes on which a place is kept for a gang that moves."""
    _chances: dict[tuple[object, ...], list[tuple[tuple[float, ...], int]]] = field(default_factory=dict)
    """By kind of unit, the nodes on which it fits once others have left: a heap of (rank, -index)."""

    def add(self, claim: Claim, *, minimum: bool) -> bool:
        """Place one gang more, or change nothing."""
        mark = self.room.mark()
        gang = PlacedGang(claim, [], fresh=True)
        if self.place(gang, claim.demand.gang, minimum=minimum, gives_way=True):
            self.crowd.add(gang)
            return True
        self.room.rollback(mark)
        return False

    def place(self, gang: PlacedGang, count: int, *, minimum: bool, gives_way: bool) -> bool:
        """Find places for `count` units of a gang; what was done before it failed is the caller's to undo.

        Args:
            minimum: the gang belongs to its claim's minimum, so that every want may have to give way.
            gives_way: others may be told to go, or be moved, for it.
        """
        count = self._place(gang, count, minimum=minimum, gives_way=gives_way)
        if count and self.last_resort and minimum:
            self.room.last_resort = True
            count = self._place(gang, count, minimum=minimum, gives_way=gives_way)
            self.room.last_resort = False
        return count == 0

    def _place(self, gang: PlacedGang, count: int, *, minimum: bool, gives_way: bool) -> int:
        """Returns how many units found no place."""
        claim, room = gang.claim, self.room
        while count and (found := room.best(claim.unit, count, minimum=minimum)) is not None:
            index, units = found
            room.take(index, scaled(claim.unit, units))
            gang.places += [index] * units
            count -= units
        while count:
            opened = self._evict_for(claim, minimum=minimum) if gives_way else None
            if opened is None and gives_way:
                opened = self._move_for(claim, minimum=minimum)
            if opened is None:
                return count
            self._occupy(gang, opened)
            count -= 1
        return 0

    def _occupy(self, gang: PlacedGang, opened: int) -> None:
        """Put a unit where there is room for it once others have left."""
        unit = gang.claim.unit
        if fits(unit, self.room.free[opened]):  # whoever left had not been told of it yet
            self.room.take(opened, unit)
        else:
            self.room.reserve(opened, unit)
            gang.now = False
        gang.places.append(opened)

    def _evict_for(self, claim: Claim, *, minimum: bool) -> int | None:
        """Make room for a unit on the node where the fewest gangs have to leave for it, if there is one."""
        allowed, shut = self._allowed(claim, minimum=minimum), self.room.shut(minimum=minimum)
        kind = (claim.unit, minimum, claim.tier)
        found = self._cheapest(claim.unit, self.room.future, allowed, kind, shut)
        if found is None:
            return None
        opened, leaving = found
        self._send_off(leaving, claim)
        return opened

    def _send_off(self, gangs: Sequence[PlacedGang], sake: Claim) -> None:
        for gang in gangs:
            self.crowd.evict(gang, sake.demand.holder)
            self.left.append(gang)

    def _cheapest(
        self,
        unit: Vector,
        rooms: Sequence[Vector],
        allowed: Mapping[int, Spare],
        kind: tuple[object, ...],
        shut: Set[int],
    ) -> tuple[int, list[PlacedGang]] | None:
        """The node on which the fewest gangs have to leave for a unit, and those.

        Most often the first node looked at will do. Where it will not, all are ranked, and the ranks are kept
        for the next unit of its kind: what has changed of a node is seen when its turn comes.
        """
        room, chances = self.room, self._chances.get(kind)
        for index in sorted(room.loosened, reverse=True):
            if index not in shut and fits(unit, rooms[index]):
                return index, []
        while chances:
            rank, negated = chances[0]
            index = -negated
            leaving = None if index in shut else self._leaving(index, unit, rooms[index], allowed)
            if leaving is None:
                heapq.heappop(chances)
            elif self._rank(index, leaving) <= rank:
                return index, leaving
            else:
                heapq.heapreplace(chances, (self._rank(index, leaving), -index))
        chances = []
        # The last nodes first: those are filled last.
        for index in sorted(self.crowd.occupied() if allowed else (), reverse=True):
            leaving = None if index in shut else self._leaving(index, unit, rooms[index], allowed)
            if leaving is not None:
                if len(leaving) <= 1:
                    return index, leaving
                chances.append((self._rank(index, leaving), -index))
        if not chances:
            return None
        heapq.heapify(chances)
        self._chances[kind] = chances
        index = -chances[0][1]
        return index, self._leaving(index, unit, rooms[index], allowed) or []

    def _rank(self, index: int, leaving: Sequence[PlacedGang]) -> tuple[float, ...]:
        return (len(leaving), self.room.emptiness(self.room.free[index]))

    def _leaving(
        self,
        index: int,
        unit: Vector,
        room: Vector,
        allowed: Mapping[int, Spare],
        spared: Mapping[int, Spare] | None = None,
    ) -> list[PlacedGang] | None:
        """The gangs that must leave a node so that a unit fits; None when it does not fit even then.

        Args:
            room: what is left there.
            allowed: how many each claim may lose here.
            spared: how many of those it needs no place for elsewhere, where others do: they leave first.
        """
        if fits(unit, room):
            return []
        if not fits(unit, self.room.total[index]):
            return None
        there = [gang for gang in self.crowd.on_node(index) if id(gang.claim) in allowed]
        there.sort(key=partial(_first_to_go, index))
        if spared is not None:
            there.sort(key=partial(_first_to_move, index, spared))
        leaving: list[PlacedGang] = []
        left: dict[int, Spare] = {}
        for gang in there:
            lacking = [have < need for have, need in zip(room, unit, strict=True)]
            if not any(lacking):
                break
            its, who = gang.claim.unit, id(gang.claim)
            gangs, bearing = left.get(who, allowed[who])
            if gangs <= 0 or (gang.bears and bearing <= 0):
                continue
            if any(lacks and takes for lacks, takes in zip(lacking, its, strict=True)):
                left[who] = (gangs - 1, bearing - gang.bears)
                leaving.append(gang)
                room = plus(room, scaled(its, gang.places.count(index)))
        if not fits(unit, room):
            return None
        for gang in reversed(leaving[:-1]):  # a larger one that was added later may do without it
            without = minus(room, scaled(gang.claim.unit, gang.places.count(index)))
            if fits(unit, without):
                leaving.remove(gang)
                room = without
        return leaving

    def _allowed(self, claim: Claim, *, minimum: bool) -> dict[int, Spare]:
        """How many gangs each claim may lose for the sake of another, by the claim's id."""
        allowed = {}
        for other in self.crowd.claims:
            spare = len(other.gangs) - other.least
            if spare <= 0 or other is claim or other.in_transit:
                continue
            if not minimum and other.tier == claim.tier:
                spare = 0 if other.settling else _above(other, claim.level(len(claim.gangs)))
            if spare and (minimum or other.tier >= claim.tier):
                allowed[id(other)] = (spare, other.bearing - other.least)
        return allowed

    def _move_for(self, claim: Claim, *, minimum: bool) -> int | None:
        """Make room for a unit by moving groups of jobs to other nodes, the fewest that do.

        Only of jobs that may have several groups: one goes on, and from it the others take their state. What
        its holder can spare need not be moved, but leaves.
        """
        movers = [
            other
            for other in self.crowd.claims
            if other is not claim
            and other.demand.kind == "training"
            and other.most > 1
            and not other.in_transit
            and id(other) not in self._pinned
            and not (other.settling and other.tier <= claim.tier and not minimum)
        ]
        if not movers:
            return None
        spared = self._allowed(claim, minimum=minimum)
        for other in movers:
            spare, _ = spared.get(id(other), (0, 0))
            if spare:  # what waits for a place itself replaces none that moves
                spared[id(other)] = (min(spare, sum(gang.now for gang in other.gangs) - other.least), 0)
        allowed = spared | {id(other): (len(other.gangs), other.bearing) for other in movers}
        chances = []
        shut = self.room.shut(minimum=minimum)
        for index in self.crowd.occupied():
            if index not in shut:
                leaving = self._leaving(index, claim.unit, self.room.future[index], allowed, spared)
                if leaving:
                    staying = _to_place(leaving, spared)
                    chances.append((len(staying), len(leaving), index, leaving, staying))
        for _, _, index, leaving, staying in sorted(chances, key=lambda chance: chance[:3])[:MOVES_TRIED]:
            mark, left = self.room.mark(), len(self.left)
            for gang in leaving:
                self.crowd.evict(gang, claim.demand.holder)
            self.room.reserve(index, claim.unit)
            if all(self._put_elsewhere(gang, claim, minimum=minimum) for gang in staying):
                self.room.leave(index, claim.unit)  # the caller keeps the place itself
                self.left += [gang for gang in leaving if gang not in staying]
                return index
            del self.left[left:]
            self.room.rollback(mark)
        return None

    def _put_elsewhere(self, gang: PlacedGang, sake: Claim, *, minimum: bool) -> bool:
        """Place a gang that was moved where there is room now, or once others have left that can be spared.

        Those do not wait for others themselves, and do not move any more: else two could wait for each other.
        """
        claim = gang.claim
        again = PlacedGang(claim, [], fresh=True)
        if not self.place(again, claim.demand.gang, minimum=False, gives_way=False):
            if not claim.runs:
                return False  # what only starts is not left without a place until others have gone
            kind = (claim.unit, minimum, sake.tier, "moved")
            while len(again.places) < claim.demand.gang:
                allowed = self._allowed(sake, minimum=minimum)
                allowed.pop(id(claim), None)
                shut = self.room.shut(minimum=minimum) | self._kept
                found = self._cheapest(claim.unit, self.room.now, allowed, kind, shut)
                if found is None:
                    return False
                opened, leaving = found
                self._send_off(leaving, sake)
                self._occupy(again, opened)
                self._mark(self._kept, opened)
                self._mark(self._pinned, *(id(other.claim) for other in leaving))
        self.crowd.add(again)
        return True

    def _mark(self, marks: set[int], *new: int) -> None:
        for each in set(new) - marks:
            marks.add(each)
            self.room.note(marks.discard, each)


def _to_place(leaving: Sequence[PlacedGang], spared: Mapping[int, Spare]) -> list[PlacedGang]:
    """Those of the gangs that leave which need a place elsewhere: what their holders cannot spare."""
    left = {who: spare for who, (spare, _) in spared.items()}
    staying = []
    for gang in leaving:
        who = id(gang.claim)
        left[who] = left.get(who, 0) - 1
        if left[who] < 0:
            staying.append(gang)
    return staying


def _above(other: Claim, level: tuple[float, int]) -> int:
    """How many gangs a claim can lose and still have more than an equal with this level."""
    spare = 0
    while len(other.gangs) - spare > other.least and other.level(len(other.gangs) - spare - 1) > level:
        spare += 1
    return spare


def _first_to_go(index: int, gang: PlacedGang) -> tuple[float, ...]:
    """Of a later tier first, then of whoever has most, what does not run yet, what frees most, the newest."""
    claim = gang.claim
    level = claim.level(len(claim.gangs))[0]
    return (-claim.tier, -level, -claim.order, gang.runs, -gang.places.count(index), -gang.serial)


def _first_to_move(index: int, spared: Mapping[int, Spare], gang: PlacedGang) -> tuple[float, ...]:
    """What can be spared, then the smallest, for which there is a place most likely."""
    claim = gang.claim
    if spared.get(id(claim), (0, 0))[0] > 0:
        return (0,)
    return (1, claim.demand.gang, sum(claim.unit), -gang.places.count(index), -gang.serial)
