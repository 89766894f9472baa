"""Which holder may run how many units on which nodes: a pure function of plain data.

The rules, in the order in which they count:

1. Nothing is granted that a node does not have; a unit is wholly on one node, of the kind that is asked for.
2. A gang (a replica group of training; of serving one replica) that runs stays where it is. It leaves the
   grant only when a node of it is gone and the rest cannot be completed, when its holder asks for less, or
   when it is above its holder's minimum and must give way, or moves (6). A holder's minimum is never taken
   from it: which of its gangs give way is decided here, how many may is not.
3. Every minimum comes before any want (a want is a gang between `min` and `max`). A holder that starts gets
   all of its minimum or nothing; one that runs takes what it lacks gang by gang. A minimum that does not
   fit makes wants give way if it fits without them. Minimums go in order of tenant (the one named by
   `priority` first), the holder's own priority, those that run, and who asked first; a later one that fits
   goes before an earlier one that does not, until that is `overdue`: then nodes are emptied for it.
4. Wants go to the tenant named by `priority` first, and within a tenant to the holders of the greatest
   priority; the later give way to the earlier. Among equals always the one with the smallest weighted
   dominant share goes next, and takes from another only if that one keeps more than it has itself.
5. On a node that is avoided nothing starts but a minimum that has no other place, even once all wants have
   given way; what runs there stays.
6. Where gangs may not be taken whose place is needed, groups of training jobs are moved out of the way, if
   they fit elsewhere, at once or beside what can be spared there. Not those of a job that takes one group
   only. One group of a job goes on all the while: where the last has to move, it stays in the grant until
   another runs elsewhere, and what it makes room for waits. A job that is built anew with every change moves
   at once instead.

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

from cluster.sharing.claims import Claim, Crowd, PlacedGang, keep_running, make_claims
from cluster.sharing.demand import Demand, Grant, Kind, Node, place_in_queue, tier_of
from cluster.sharing.placing import Placer
from cluster.sharing.room import Room, Scale, Vector, minus, plus, times


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
    scale = Scale(demands)
    room = Room(nodes, scale)
    tiers = sorted({tier_of(demand, priority) for demand in demands})
    queue = sorted(demands, key=partial(place_in_queue, priority=priority, since=since or {}))
    claims = make_claims(queue, tiers, scale, room, priority, settling)
    keep_running(room, claims, promised or {})
    crowd = Crowd(room, claims)
    floor = _Floor(room, crowd, Placer(room, crowd))
    for claim in claims:
        floor.meet_minimum(claim)
        if claim.waits and claim.demand.holder in overdue:
            room.closed.update(_soonest_nodes(room, claims, claim))
    for claim in claims:
        floor.leave_avoided(claim)
    growing = True
    while growing:
        for tier in range(len(tiers)):
            floor.meet_wants([claim for claim in claims if claim.tier == tier])
        # A holder that grew elsewhere can spare the very place that a minimum needs.
        met = [floor.meet_minimum(claim) for claim in claims if claim.waits]
        # And so can one that took a want from another.
        left = [floor.leave_avoided(claim) for claim in claims]
        growing = any(met) or any(left)
    return {claim.demand.holder: claim.grant(room) for claim in claims}


@dataclass
class _Floor:
    """The order in which minimums and wants are met; what failed is not tried again in vain."""

    room: Room
    crowd: Crowd
    placer: Placer
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

    def _complete(self, claim: Claim, gang: PlacedGang) -> None:
        """Replace the units of a gang whose nodes are gone, or let the rest of it go."""
        if len(claim.gangs) < claim.most:
            missing = PlacedGang(claim, [], fresh=True)
            lacking = claim.demand.gang - len(gang.places)
            mark, minimum = self.room.mark(), len(claim.gangs) < claim.least
            self.placer.last_resort = minimum
            complete = self.placer.place(missing, lacking, minimum=minimum, gives_way=True)
            self.placer.last_resort = False
            if complete:
                gang.places += missing.places
                gang.runs, gang.now = False, missing.now  # it has to start anew
                self.crowd.add(gang)
                return
            self.room.rollback(mark)
        for index in gang.places:
            self.room.leave(index, claim.unit)

    def _add_all(self, claim: Claim, count: int, *, minimum: bool) -> bool:
        """Place so many gangs more, or change nothing."""
        if self._try_all(claim, count, minimum=minimum):
            return True
        if not minimum or not self.room.avoided:
            return False
        self.placer.last_resort = True
        placed = self._try_all(claim, count, minimum=True)
        self.placer.last_resort = False
        return placed

    def _try_all(self, claim: Claim, count: int, *, minimum: bool) -> bool:
        kind = (claim.unit, claim.demand.gang, minimum, claim.tier, count, self.placer.last_resort)
        level = claim.level(len(claim.gangs))
        # What failed for one fails for the next of its kind who is due no more, unless something changed.
        version, failed_at = self._failed.get(kind, (-1, level))
        if version == self.room.version and level >= failed_at:
            return False
        mark = self.room.mark()
        self.placer.left = []
        if all(self.placer.add(claim, minimum=minimum) for _ in range(count)):
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
        if not all(self.placer.add(claim, minimum=minimum) for _ in range(count)):
            self.room.rollback(mark)
            return False
        self.placer.left = [gang for gang in reversed(gone) if not self.crowd.restore(gang)]
        for other, whom in before:
            if not any(gang.claim is other for gang in self.placer.left):
                other.gave_way_to = whom
        return True

    def leave_avoided(self, claim: Claim) -> bool:
        """Have what is to start on nodes that are avoided start elsewhere, if there is room by now; whether
        any does."""
        if not self.room.avoided:
            return False
        left = False
        for gang in [gang for gang in claim.gangs[: claim.least] if gang.fresh and gang.now]:
            if self.room.avoided.isdisjoint(gang.places):
                continue
            mark = self.room.mark()
            self.crowd.evict(gang, claim.demand.holder)
            if self._try_all(claim, 1, minimum=True):
                left = True
            else:
                self.room.rollback(mark)
        return left

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
                for gang in self.placer.left:  # it may find a place elsewhere
                    if gang.claim.tier == claim.tier and not gang.claim.settling:
                        enter(gang.claim)
        return changed


def _soonest_nodes(room: Room, claims: Sequence[Claim], claim: Claim) -> list[int]:
    """The nodes on which a minimum that waits will fit soonest; none where it never will.

    Those are the nodes with the least on them that cannot be told to go, and those that are avoided last.
    What runs there ends, no other minimum is added, so this one gets its turn; wants may use the nodes
    meanwhile, since they give way.
    """
    missing = (claim.least - len(claim.gangs)) * claim.demand.gang
    stays = _minimums_by_node(claims)
    # A job ends by itself, an app does not.
    for_good = _minimums_by_node([other for other in claims if other.demand.kind == "serving"])
    chances = []
    for index, total in enumerate(room.total):
        units = times(minus(total, for_good[index]) if index in for_good else total, claim.unit)
        if units and index not in room.closed:
            burden = room.emptiness(stays[index]) if index in stays else 0.0
            chances.append((index in room.avoided, burden / min(units, missing), index, units))
    nodes = []
    for *_, index, units in sorted(chances):
        if missing > 0:
            nodes.append(index)
            missing -= units
    return nodes if missing <= 0 else []


def _minimums_by_node(claims: Sequence[Claim]) -> dict[int, Vector]:
    """What the gangs that nobody can be told to give up take of each node."""
    taken: dict[int, Vector] = {}
    for claim in claims:
        for gang in claim.gangs[: claim.least]:
            for index in gang.places:
                taken[index] = plus(taken[index], claim.unit) if index in taken else claim.unit
    return taken
