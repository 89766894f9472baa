"""Where a gang is placed, and who gives way or moves for it when there is no room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cluster.sharing.claims import Claim, Crowd, Gang
from cluster.sharing.room import Room, fits, plus, scaled

MOVES_TRIED = 8
"""Nodes on which a place is sought by moving others, the most promising first."""

Spare = tuple[int, int]
"""How many gangs a claim may lose, and how many of those that run: what replaces one does not run at once."""


@dataclass
class Placer:
    """Places one gang at a time; a step that fails changes nothing.

    Attributes:
        left: the gangs that gave way since the caller emptied the list.
        last_resort: what finds no other place may have one on a node that is avoided.
    """

    room: Room
    crowd: Crowd
    left: list[Gang] = field(default_factory=list)
    last_resort: bool = False

    def add(self, claim: Claim, *, minimum: bool) -> bool:
        """Place one gang more, or change nothing."""
        mark = self.room.mark()
        gang = Gang(claim, [], fresh=True)
        if self.place(gang, claim.demand.gang, minimum=minimum, gives_way=True):
            self.crowd.add(gang)
            return True
        self.room.rollback(mark)
        return False

    def place(self, gang: Gang, count: int, *, minimum: bool, gives_way: bool) -> bool:
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

    def _place(self, gang: Gang, count: int, *, minimum: bool, gives_way: bool) -> int:
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
            if fits(claim.unit, room.free[opened]):  # whoever left had not been told of it yet
                room.take(opened, claim.unit)
            else:
                room.reserve(opened, claim.unit)
                gang.now = False
            gang.places.append(opened)
            count -= 1
        return 0

    def _evict_for(self, claim: Claim, *, minimum: bool) -> int | None:
        """Make room for a unit on the node where the fewest gangs have to leave for it, if there is one."""
        room, allowed = self.room, self._allowed(claim, minimum=minimum)
        occupied, shut = self.crowd.occupied() if allowed else (), room.shut(minimum=minimum)
        found: tuple[tuple[float, ...], int, list[Gang]] | None = None
        # The last nodes first: those are filled last.
        for index in sorted(room.loosened.union(occupied), reverse=True):
            if index in shut:
                continue
            leaving = self._leaving(index, claim, allowed)
            if leaving is None:
                continue
            rank = (len(leaving), room.emptiness(room.free[index]))
            if found is None or rank < found[0]:
                found = (rank, index, leaving)
            if len(leaving) <= 1:
                # Most often so on the first node; a node where nobody has to leave is not worth a search.
                break
        if found is None:
            return None
        _, opened, leaving = found
        for gang in leaving:
            self.crowd.evict(gang, claim.demand.holder)
            self.left.append(gang)
        return opened

    def _leaving(
        self, index: int, claim: Claim, allowed: Mapping[int, Spare], *, moves: bool = False
    ) -> list[Gang] | None:
        """The gangs that must leave a node so that a unit fits; None when it does not fit even then."""
        future, unit = self.room.future[index], claim.unit
        if fits(unit, future):
            return []
        if not fits(unit, self.room.total[index]):
            return None
        there = [gang for gang in self.crowd.on_node(index) if id(gang.claim) in allowed]
        leaving: list[Gang] = []
        left: dict[int, Spare] = {}
        for gang in sorted(there, key=partial(_first_to_move if moves else _first_to_go, index)):
            lacking = [have < need for have, need in zip(future, unit, strict=True)]
            if not any(lacking):
                break
            its, who = gang.claim.unit, id(gang.claim)
            gangs, running = left.get(who, allowed[who])
            if gangs <= 0 or (gang.runs and running <= 0):
                continue
            if any(lacks and takes for lacks, takes in zip(lacking, its, strict=True)):
                left[who] = (gangs - 1, running - gang.runs)
                leaving.append(gang)
                future = plus(future, scaled(its, gang.places.count(index)))
        return leaving if fits(unit, future) else None

    def _allowed(self, claim: Claim, *, minimum: bool) -> dict[int, Spare]:
        """How many gangs each claim may lose for the sake of another, by the claim's id."""
        allowed = {}
        for other in self.crowd.claims:
            spare = len(other.gangs) - other.least
            if other is claim or spare <= 0:
                continue
            if not minimum and other.tier == claim.tier:
                spare = 0 if other.settling else _above(other, claim.level(len(claim.gangs)))
            if spare and (minimum or other.tier >= claim.tier):
                allowed[id(other)] = (spare, other.running - other.least)
        return allowed

    def _move_for(self, claim: Claim, *, minimum: bool) -> int | None:
        """Make room for a unit by moving groups of jobs to other nodes, the fewest that do.

        Only of jobs with several groups: one stays where it is, and from it the moved ones take their state.
        """
        movable = {
            id(other): (len(other.gangs), other.running - 1)
            for other in self.crowd.claims
            if other is not claim
            and other.demand.kind == "training"
            and len(other.gangs) > 1
            and not other.settling
        }
        if not movable:
            return None
        chances = []
        shut = self.room.shut(minimum=minimum)
        for index in self.crowd.occupied():
            if index not in shut:
                leaving = self._leaving(index, claim, movable, moves=True)
                if leaving:
                    chances.append((len(leaving), index, leaving))
        for _, index, leaving in sorted(chances, key=lambda chance: chance[:2])[:MOVES_TRIED]:
            mark = self.room.mark()
            for gang in leaving:
                self.crowd.evict(gang, claim.demand.holder)
            self.room.reserve(index, claim.unit)
            if self._put_elsewhere(leaving):
                self.room.leave(index, claim.unit)  # the caller keeps the place itself
                return index
            self.room.rollback(mark)
        return None

    def _put_elsewhere(self, gangs: Sequence[Gang]) -> bool:
        for gang in gangs:
            again = Gang(gang.claim, [], fresh=True)
            if not self.place(again, gang.claim.demand.gang, minimum=False, gives_way=False):
                return False
            self.crowd.add(again)
        return True


def _above(other: Claim, level: tuple[float, int]) -> int:
    """How many gangs a claim can lose and still have more than an equal with this level."""
    spare = 0
    while len(other.gangs) - spare > other.least and other.level(len(other.gangs) - spare - 1) > level:
        spare += 1
    return spare


def _first_to_go(index: int, gang: Gang) -> tuple[float, ...]:
    """Of a later tier first, then of whoever has most, what does not run yet, what frees most, the newest."""
    claim = gang.claim
    level = claim.level(len(claim.gangs))[0]
    return (-claim.tier, -level, -claim.order, gang.runs, -gang.places.count(index), -gang.serial)


def _first_to_move(index: int, gang: Gang) -> tuple[float, ...]:
    """The smallest, for which there is a place most likely."""
    return (gang.claim.demand.gang, sum(gang.claim.unit), -gang.places.count(index), -gang.serial)
