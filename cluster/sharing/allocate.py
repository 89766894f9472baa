"""Which holder may run how many units on which nodes: a pure function of plain data.

The rules, in the order in which they count:

1. Nothing is granted that a node does not have; a unit is wholly on one node, of the kind that is asked for.
2. A gang (a replica group of training; of serving one replica) that runs stays where it is. It leaves the
   grant only when a node of it is gone and the rest cannot be completed, when its holder asks for less, or
   when it is above its holder's minimum and must give way. A holder's minimum is never taken from it: which
   of its gangs give way is decided here, how many may is not.
3. Every minimum comes before any want (a want is a gang between `min` and `max`). A holder that starts gets
   all of its minimum or nothing; one that runs takes what it lacks gang by gang. A minimum that does not
   fit makes wants give way if it fits without them. Minimums go in order of tenant (the one named by
   `priority` first), the holder's own priority, those that run, and who asked first; a later one that fits
   goes before an earlier one that does not, until that is `overdue`: then nodes are emptied for it.
4. Wants go to the tenant named by `priority` first, and within a tenant to the holders of the greatest
   priority; the later give way to the earlier. Among equals always the one with the smallest weighted
   dominant share goes next, and takes from another only if that one keeps more than it has itself.
5. Where room for a gang is scattered, groups of training jobs are moved to make it, if they fit elsewhere
   and a group of the same job stays where it is.

A gang that must give way leaves its holder's grant at once, but what it occupies is granted to nobody
until the holder says that it is gone (it is no longer in `held`): whatever waits for it is kept a place
and granted then. So grants and running units together never exceed a node.

Units are placed best-fit (on the fullest node that still has room), so that room for large ones stays; a
gang on as few nodes as possible.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cluster.sharing.claims import Claim, Crowd, Gang, keep_running, make_claims
from cluster.sharing.demand import Demand, Grant, Kind, Node
from cluster.sharing.room import Room, Scale, fits, plus, scaled, times


def allocate(
    nodes: Sequence[Node],
    demands: Sequence[Demand],
    priority: Kind,
    *,
    since: Mapping[str, float] | None = None,
    promised: Mapping[str, Collection[int]] | None = None,
    overdue: Collection[str] = (),
    settling: Collection[str] = (),
) -> dict[str, Grant]:
    """Grant every holder its units; a holder that must wait gets an empty grant.

    Args:
        nodes: the nodes that are alive, with all they have.
        demands: one of each holder, `held` included.
        priority: the tenant whose wants come first (and whose minimums, where not all of them fit).
        since: when each holder asked first; where minimums compete, the earlier goes first, then the
            lesser name. Without it the result does not depend on the order of `demands`.
        promised: the indexes in each holder's `held` of units that were granted but do not run yet; on
            a node that turns out to be too full they go before those that run.
        overdue: holders that have waited so long that nothing may start any more that stands in their way.
        settling: holders that changed a moment ago: they take no want and lose none to their equals.

    The result is stable: with `held` set to what was granted, the next call grants the same again,
    unless units that gave way made room for one who waits.

    Raises:
        ValueError: two demands of one holder, or two nodes of one id.
    """
    if len({node.node_id for node in nodes}) != len(nodes):
        raise ValueError("two nodes have the same id")
    if len({demand.holder for demand in demands}) != len(demands):
        raise ValueError("two demands have the same holder")
    since = since or {}
    scale = Scale(demands)
    room = Room(nodes, scale)

    def precedence(demand: Demand) -> tuple[object, ...]:
        first = since.get(demand.holder, 0.0)
        return (demand.kind != priority, -demand.priority, not demand.held, first, demand.holder)

    tiers = sorted({(demand.kind != priority, -demand.priority) for demand in demands})
    claims = make_claims(sorted(demands, key=precedence), tiers, scale, room, priority, settling)
    keep_running(room, claims, promised or {})
    floor = _Floor(room, Crowd(room, claims))
    for claim in claims:
        floor.meet_minimum(claim)
        if claim.waits and claim.demand.holder in overdue:
            floor.close_nodes(claim)
    growing = True
    while growing:
        for tier in range(len(tiers)):
            floor.meet_wants([claim for claim in claims if claim.tier == tier])
        # A holder that grew elsewhere can spare the very place that a minimum needs.
        met = [floor.meet_minimum(claim) for claim in claims if claim.waits]
        growing = any(met)
    return {claim.demand.holder: claim.grant(room) for claim in claims}


@dataclass
class _Floor:
    """Where gangs are placed, and where others give way for them."""

    room: Room
    crowd: Crowd
    _failed: dict[tuple[object, ...], tuple[int, tuple[float, int]]] = field(default_factory=dict)

    # -- minimums -----------------------------------------------------------------------------------------

    def meet_minimum(self, claim: Claim) -> bool:
        """Whether anything was added to what the claim has of its minimum."""
        for gang in claim.broken:
            self._complete(claim, gang)
        claim.broken.clear()
        before, missing = len(claim.gangs), claim.least - len(claim.gangs)
        if missing <= 0:
            claim.waits = False
        elif claim.runs:
            while missing and self._add_all(claim, 1, minimum=True):
                missing -= 1
            claim.waits = missing > 0
        else:
            claim.waits = not self._add_all(claim, missing, minimum=True)
            if claim.waits:
                # Too little to start and no way to complete it: what was promised is of use to others only.
                for gang in list(claim.gangs):
                    self.crowd.evict(gang, claim.demand.holder)
                claim.gave_way_to.clear()
        return len(claim.gangs) > before

    def _complete(self, claim: Claim, gang: Gang) -> None:
        """Replace the units of a gang whose nodes are gone, or let the rest of it go."""
        if len(claim.gangs) < claim.most:
            missing = Gang(claim, [], fresh=True)
            lacking = claim.demand.gang - len(gang.places)
            mark = self.room.mark()
            if self._place(missing, lacking, minimum=len(claim.gangs) < claim.least, gives_way=True):
                gang.places += missing.places
                gang.runs, gang.now = False, missing.now  # it has to start anew
                self.crowd.add(gang)
                return
            self.room.rollback(mark)
        for index in gang.places:
            self.room.leave(index, claim.unit)

    def _add_all(self, claim: Claim, count: int, *, minimum: bool) -> bool:
        """Place so many gangs more, or change nothing."""
        kind = (claim.unit, claim.demand.gang, minimum, claim.tier, count)
        level = claim.level(len(claim.gangs))
        # What failed for one fails for the next of its kind who is due no more, unless something changed.
        version, failed_at = self._failed.get(kind, (-1, level))
        if version == self.room.version and level >= failed_at:
            return False
        mark = self.room.mark()
        self._left = []
        if all(self._add(claim, minimum=minimum) for _ in range(count)):
            return True
        self.room.rollback(mark)
        if count * claim.demand.gang > 1 and self._add_alone(claim, count, minimum=minimum):
            return True
        self._failed[kind] = (self.room.version, level)
        return False

    def _add_alone(self, claim: Claim, count: int, *, minimum: bool) -> bool:
        """Place so many gangs with every want out of the way that may be; those that need not go come back.

        Taking wants away one by one may spend the few that a holder can spare in the wrong place. This way
        what fits beside all that must stay, as it stands, is always placed.
        """
        gone = [
            gang
            for other in reversed(self.crowd.claims)
            if other is not claim and (minimum or other.tier > claim.tier)
            for gang in reversed(other.gangs[other.least :])
        ]
        if not gone:
            return False
        mark = self.room.mark()
        before = [(gang.claim, set(gang.claim.gave_way_to)) for gang in gone]
        for gang in gone:
            self.crowd.evict(gang, claim.demand.holder)
        if not all(self._add(claim, minimum=minimum) for _ in range(count)):
            self.room.rollback(mark)
            return False
        self._left = [gang for gang in reversed(gone) if not self.crowd.restore(gang)]
        for other, whom in before:
            if not any(gang.claim is other for gang in self._left):
                other.gave_way_to = whom
        return True

    def close_nodes(self, claim: Claim) -> None:
        """Let no further minimum start on the nodes where this one will fit soonest.

        Those are the nodes with the least on them that cannot be told to go. What runs there ends, nothing
        is added, so the minimum gets its turn; wants may use the nodes meanwhile, since they give way.
        """
        missing = (claim.least - len(claim.gangs)) * claim.demand.gang
        stays: dict[int, tuple[int, ...]] = {}
        serves: dict[int, tuple[int, ...]] = {}
        for other in self.crowd.claims:
            for gang in other.gangs[: other.least]:
                for index in gang.places:
                    stays[index] = plus(stays.get(index, scaled(other.unit, 0)), other.unit)
                    if other.demand.kind == "serving":  # it does not end by itself
                        serves[index] = plus(serves.get(index, scaled(other.unit, 0)), other.unit)
        chances = []
        for index, total in enumerate(self.room.total):
            for_good = serves.get(index)
            left = total if for_good is None else tuple(a - b for a, b in zip(total, for_good, strict=True))
            units = times(left, claim.unit)
            if units and index not in self.room.closed:
                burden = self.room.emptiness(stays[index]) if index in stays else 0.0
                chances.append((burden / min(units, missing), index, units))
        closing = []
        for _, index, units in sorted(chances):
            if missing <= 0:
                break
            closing.append(index)
            missing -= units
        if missing <= 0:
            self.room.closed.update(closing)

    # -- wants --------------------------------------------------------------------------------------------

    def meet_wants(self, tier: Sequence[Claim]) -> None:
        """Hand out gangs above the minimums, always to the holder with the smallest share."""
        # A holder that grew can spare a gang that it could not spare before: then all are asked again.
        while self._hand_out(tier):
            pass

    def _hand_out(self, tier: Sequence[Claim]) -> bool:
        """Until nobody can have one more; whether anybody had."""
        orders = {id(claim): order for order, claim in enumerate(tier)}
        queue: list[tuple[tuple[float, int], int, Claim]] = []
        waiting: set[int] = set()

        def enter(claim: Claim) -> None:
            if id(claim) not in waiting and len(claim.gangs) < claim.most:
                waiting.add(id(claim))
                heapq.heappush(queue, (claim.level(len(claim.gangs)), orders[id(claim)], claim))

        for claim in tier:
            if not claim.waits and not claim.settling:
                enter(claim)
        changed = False
        while queue:
            *_, claim = heapq.heappop(queue)
            waiting.discard(id(claim))
            if self._add_all(claim, 1, minimum=False):
                changed = True
                enter(claim)
                for gang in self._left:  # it may find a place elsewhere
                    if gang.claim.tier == claim.tier and not gang.claim.settling:
                        enter(gang.claim)
        return changed

    # -- one gang -----------------------------------------------------------------------------------------

    def _add(self, claim: Claim, *, minimum: bool) -> bool:
        """Place one gang more, or change nothing."""
        mark = self.room.mark()
        gang = Gang(claim, [], fresh=True)
        if self._place(gang, claim.demand.gang, minimum=minimum, gives_way=True):
            self.crowd.add(gang)
            return True
        self.room.rollback(mark)
        return False

    def _place(self, gang: Gang, count: int, *, minimum: bool, gives_way: bool) -> bool:
        """Find places for `count` units of a gang; what was done before it failed is the caller's to undo."""
        claim, room = gang.claim, self.room
        while count and (found := room.best(claim.unit, count, minimum=minimum)) is not None:
            index, units = found
            room.take(index, scaled(claim.unit, units))
            gang.places += [index] * units
            count -= units
        while count:
            if not gives_way or not (
                self._evict_for(claim, minimum=minimum) or self._move_for(claim, minimum=minimum)
            ):
                return False
            index = self._opened
            if fits(claim.unit, room.free[index]):  # whoever left had not been told of it yet
                room.take(index, claim.unit)
            else:
                room.reserve(index, claim.unit)
                gang.now = False
            gang.places.append(index)
            count -= 1
        return True

    _opened: int = -1
    """The node on which room was made last."""
    _left: list[Gang] = field(default_factory=list)
    """The gangs that gave way for the one that is being placed."""

    def _evict_for(self, claim: Claim, *, minimum: bool) -> bool:
        """Make room for a unit on the node where the fewest gangs have to leave for it, if there is one."""
        room, allowed = self.room, self._allowed(claim, minimum=minimum)
        occupied = self.crowd.occupied() if allowed else ()
        found: tuple[tuple[object, ...], list[Gang]] | None = None
        for index in sorted(room.loosened.union(occupied)):
            if minimum and index in room.closed:
                continue
            leaving = self._leaving(index, claim, allowed)
            if leaving is not None:
                rank = (len(leaving), room.emptiness(room.free[index]), index)
                if found is None or rank < found[0]:
                    found = (rank, leaving)
                if (
                    len(leaving) <= 1
                ):  # most often the first that is looked at; fewer than one is not worth a search
                    break
        if found is None:
            return False
        (*_, self._opened), leaving = found  # type: ignore[assignment]
        for gang in leaving:
            self.crowd.evict(gang, claim.demand.holder)
            self._left.append(gang)
        return True

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
                spare = 0 if other.settling else self._above(other, claim.level(len(claim.gangs)))
            if spare and (minimum or other.tier >= claim.tier):
                allowed[id(other)] = (spare, other.running - other.least)
        return allowed

    @staticmethod
    def _above(other: Claim, level: tuple[float, int]) -> int:
        """How many gangs a claim can lose and still have more than an equal with this level."""
        spare = 0
        while len(other.gangs) - spare > other.least and other.level(len(other.gangs) - spare - 1) > level:
            spare += 1
        return spare

    def _move_for(self, claim: Claim, *, minimum: bool) -> bool:
        """Make room for a unit by moving groups of elastic jobs to other nodes, the fewest that do."""
        movable = {
            id(other): (len(other.gangs), other.running - 1)
            for other in self.crowd.claims
            if other is not claim
            and other.demand.kind == "training"
            and len(other.gangs) > 1
            and not other.settling
        }
        if not movable:
            return False
        chances = []
        for index in self.crowd.occupied():
            if not (minimum and index in self.room.closed):
                leaving = self._leaving(index, claim, movable, moves=True)
                if leaving:
                    chances.append((len(leaving), index, leaving))
        for _, index, leaving in sorted(chances, key=lambda chance: chance[:2])[:_MOVES_TRIED]:
            mark = self.room.mark()
            for gang in leaving:
                self.crowd.evict(gang, claim.demand.holder)
            self.room.reserve(index, claim.unit)
            if all(self._put_elsewhere(gang) for gang in leaving):
                # The caller keeps the place itself.
                self.room.leave(index, claim.unit)
                self._opened = index
                return True
            self.room.rollback(mark)
        return False

    def _put_elsewhere(self, gang: Gang) -> bool:
        again = Gang(gang.claim, [], fresh=True)
        if not self._place(again, gang.claim.demand.gang, minimum=False, gives_way=False):
            return False
        self.crowd.add(again)
        return True


_MOVES_TRIED = 8
"""Nodes on which a place is sought by moving others, the most promising first."""


Spare = tuple[int, int]
"""How many gangs a claim may lose, and how many of those that run: what replaces one does not run at once."""


def _first_to_go(index: int, gang: Gang) -> tuple[float, ...]:
    """Of a later tier first, then of whoever has most, what does not run yet, what frees most, the newest."""
    claim = gang.claim
    level = claim.level(len(claim.gangs))[0]
    return (-claim.tier, -level, -claim.order, gang.runs, -gang.places.count(index), -gang.serial)


def _first_to_move(index: int, gang: Gang) -> tuple[float, ...]:
    """The smallest, for which there is a place most likely."""
    return (gang.claim.demand.gang, sum(gang.claim.unit), -gang.places.count(index), -gang.serial)
