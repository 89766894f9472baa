"""Which holder may run how many units on which nodes: a pure function of plain data.

The rules, in the order in which they count:

1. Nothing is granted that a node does not have; a unit is wholly on one node.
2. A unit that runs stays where it is. It leaves the grant only when its node is gone, when its holder
   asks for less (`max` fell), when its holder can no longer have its minimum (training: a group of too
   few workers cannot run, so it gives back all of them), or when it is a unit above its holder's
   minimum that must give way.
3. Every minimum comes before any want (a want is a unit between `min` and `max`). A minimum is a gang:
   a holder gets all of it or nothing; only a serving app that runs already takes less, since one more
   replica helps it. A minimum that does not fit makes wants give way if it fits without them.
4. Wants go to the tenant named by `priority` first, then to the other; within a tenant always to the
   holder with the fewest so far. Wants of the other tenant give way to those of the first.

A unit that must give way leaves its holder's grant at once, but what it occupies is granted to nobody
until the holder says that it is gone (it is no longer in `held`): whatever waits for it is kept a place
and granted then. So grants and running units together never exceed a node.

Units are placed best-fit (on the fullest node that still has room), so that room for large units stays.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.sharing.demand import Demand, Grant, Kind, Node

STEPS = 10_000
"""Resources are counted in whole ten-thousandths, as Ray does, so that sums are exact."""

YIELDING: tuple[Kind, ...] = ("serving",)

Vector = tuple[int, ...]


def allocate(
    nodes: Sequence[Node],
    demands: Sequence[Demand],
    priority: Kind,
    *,
    yielding: Collection[Kind] = YIELDING,
    since: Mapping[str, float] | None = None,
    promised: Mapping[str, int] | None = None,
) -> dict[str, Grant]:
    """Grant every holder its units; a holder that must wait gets an empty grant.

    Args:
        nodes: the nodes that are alive, with all they have.
        demands: one of each holder, `held` included.
        priority: the tenant whose wants come first (and whose minimums, where not all of them fit).
        yielding: the tenants whose running units may be taken back. Training is not among them: a job
            runs as one group, which cannot lose a worker and go on.
        since: when each holder asked first; where minimums compete, the earlier goes first, then the
            lesser name. Without it the result does not depend on the order of `demands`.
        promised: how many units at the end of each holder's `held` were granted but do not run yet; on
            a node that turns out to be too full they go before those that run.

    The result is stable: with `held` set to what was granted, the next call grants the same again,
    unless units that gave way made room for one who waits.

    Cost: O(nodes + units * (log nodes + changes)) for each distinct unit, where `changes` are the nodes
    touched since that unit was last placed; a minimum that waits for others to give way costs
    O(its units * nodes).

    Raises:
        ValueError: two demands of one holder, or two nodes of one id.
    """
    if len({node.node_id for node in nodes}) != len(nodes):
        raise ValueError("two nodes have the same id")
    if len({demand.holder for demand in demands}) != len(demands):
        raise ValueError("two demands have the same holder")
    since = since or {}
    kinds = sorted(
        {name for demand in demands for name, amount in demand.unit.items() if amount > 0} | {"GPU"}
    )
    room = _Room(nodes, kinds)

    def precedence(demand: Demand) -> tuple[object, ...]:
        return (demand.kind != priority, not demand.held, since.get(demand.holder, 0.0), demand.holder)

    claims = [
        _Claim(demand, _vector(demand.unit, kinds, up=True), yields=demand.kind in yielding)
        for demand in sorted(demands, key=precedence)
    ]
    _keep(room, claims, promised or {})
    for claim in claims:
        _meet_minimum(room, claim, claims)
    for kind in (priority, "training" if priority == "serving" else "serving"):
        tenant = [claim for claim in claims if claim.demand.kind == kind]
        others = [claim for claim in claims if claim.demand.kind != kind] if kind == priority else []
        _meet_wants(room, tenant, others)
    return {
        claim.demand.holder: Grant(claim.demand.holder, tuple(room.ids[index] for index in claim.places))
        for claim in claims
    }


@dataclass(eq=False)
class _Claim:
    """One demand while it is being decided; `places` are the node indexes of the grant so far."""

    demand: Demand
    unit: Vector
    yields: bool
    places: list[int] = field(default_factory=list)
    waits: bool = False
    """Its minimum is not met yet (it may have places kept for it that are still occupied)."""

    @property
    def most(self) -> int:
        return max(self.demand.min, self.demand.max)

    def spare(self) -> Iterable[int]:
        """Node indexes of the units that can be taken back, the newest first."""
        return reversed(self.places[self.demand.min :]) if self.yields else ()

    def drop(self, index: int) -> None:
        """Take the newest unit on this node out of the grant."""
        for position in range(len(self.places) - 1, -1, -1):
            if self.places[position] == index:
                del self.places[position]
                return


def _keep(room: _Room, claims: Sequence[_Claim], promised: Mapping[str, int]) -> None:
    """Let running units stay where they are, then those that were only promised."""
    waiting: dict[_Claim, list[str]] = {}
    for claim in claims:
        held = claim.demand.held
        running = max(0, len(held) - promised.get(claim.demand.holder, 0))
        waiting[claim] = list(held[running:])
        claim.places += room.keep(held[:running], claim.unit)
    for claim in claims:
        claim.places += room.keep(waiting[claim], claim.unit)
        if claim.yields:
            for index in claim.places[claim.most :]:
                room.leave(index, claim.unit)
            del claim.places[claim.most :]


def _meet_minimum(room: _Room, claim: _Claim, claims: Sequence[_Claim]) -> None:
    missing = claim.demand.min - len(claim.places)
    if missing <= 0:
        return
    gang = claim.demand.kind == "training" or not claim.places
    placed: list[int] = []
    while len(placed) < missing and (index := room.best(claim.unit)) is not None:
        room.take(index, claim.unit)
        placed.append(index)
    if len(placed) == missing:
        claim.places += placed
        return
    claim.waits = True
    if not gang:
        claim.places += placed
        _keep_places(room, claim, missing - len(placed), claims, partly=True)
        return
    for index in placed:
        room.give(index, claim.unit)
    if not _keep_places(room, claim, missing, claims, partly=False):
        # Too few to run and no way to complete them: what it has is of use to others only.
        for index in claim.places:
            room.leave(index, claim.unit)
        claim.places.clear()


def _meet_wants(room: _Room, tenant: Sequence[_Claim], others: Sequence[_Claim]) -> None:
    """Hand out units above the minimums, always to the holder with the fewest of them."""
    queue = [
        (len(claim.places) - claim.demand.min, order, claim)
        for order, claim in enumerate(tenant)
        if not claim.waits and len(claim.places) < claim.most
    ]
    heapq.heapify(queue)
    while queue:
        wants, order, claim = heapq.heappop(queue)
        index = room.best(claim.unit)
        if index is not None:
            room.take(index, claim.unit)
            claim.places.append(index)
        elif not others or not _keep_places(room, claim, 1, others, partly=False):
            continue
        if wants + 1 + claim.demand.min < claim.most:
            heapq.heappush(queue, (wants + 1, order, claim))


def _keep_places(room: _Room, claim: _Claim, count: int, others: Sequence[_Claim], *, partly: bool) -> bool:
    """Keep `count` places that are free, or will be once units gave way; False (and nothing) if it cannot.

    With `partly` as many as there are. Each unit goes where the fewest units have to give way.
    """
    spare = _spare(others, claim)
    possible = 0
    for index in range(len(room.ids)):
        if possible >= count:
            break
        future = room.future[index]
        for _, unit in spare.get(index, ()):
            future = _plus(future, unit)
        possible += _times(future, claim.unit, count)
    if possible < count and not partly:
        return False
    for _ in range(min(count, possible)):
        choices = (
            (
                len(leaving),
                not _fits(claim.unit, room.free[index]),
                room.score(index, claim.unit),
                index,
                leaving,
            )
            for index in range(len(room.ids))
            if (leaving := _leaving(room.future[index], claim.unit, spare.get(index, ()))) is not None
        )
        *_, index, leaving = min(choices, key=lambda choice: choice[:4])
        for victim, unit in leaving:
            victim.drop(index)
            spare[index].remove((victim, unit))
            room.leave(index, unit)
        room.reserve(index, claim.unit)
    return True


def _spare(others: Sequence[_Claim], claim: _Claim) -> dict[int, list[tuple[_Claim, Vector]]]:
    """By node, the units that can be taken back, those to go first in front.

    The tenant without priority comes last in `others`, so the list is read from behind.
    """
    spare: dict[int, list[tuple[_Claim, Vector]]] = {}
    for other in reversed(others):
        if other is not claim:
            for index in other.spare():
                spare.setdefault(index, []).append((other, other.unit))
    return spare


def _leaving(
    future: Vector, unit: Vector, spare: Sequence[tuple[_Claim, Vector]]
) -> list[tuple[_Claim, Vector]] | None:
    """The units of one node that must give way so that `unit` fits; None when it does not fit even then."""
    leaving: list[tuple[_Claim, Vector]] = []
    for other, its in spare:
        lacking = [have < need for have, need in zip(future, unit, strict=True)]
        if not any(lacking):
            break
        if any(lacks and amount for lacks, amount in zip(lacking, its, strict=True)):
            leaving.append((other, its))
            future = _plus(future, its)
    return leaving if _fits(unit, future) else None


class _Room:
    """What is left on each node, now (`free`) and once all that must give way has gone (`future`).

    A unit is granted only where it fits in both: in `free` because running units are still there, in
    `future` because places are kept for those who wait.
    """

    def __init__(self, nodes: Sequence[Node], kinds: Sequence[str]) -> None:
        # By name, so that equally good nodes fill in an order that people expect.
        ordered = sorted(nodes, key=lambda node: (node.name, node.node_id))
        self.ids = [node.node_id for node in ordered]
        self.free = [_vector(node.resources, kinds, up=False) for node in ordered]
        self.future = list(self.free)
        self._index = {node_id: index for index, node_id in enumerate(self.ids)}
        most = [max((free[kind] for free in self.free), default=0) for kind in range(len(kinds))]
        self._weights = [1.0 / amount if amount else 0.0 for amount in most]
        self._stamps = [0] * len(ordered)
        self._log: list[int] = []
        # For each distinct unit: (score, node index, stamp) of the nodes it fits on, and how much of
        # the log is in it. An entry whose stamp is old is skipped, so no entry is ever searched for.
        self._heaps: dict[Vector, tuple[list[tuple[float, int, int]], int]] = {}

    def keep(self, held: Iterable[str], unit: Vector) -> list[int]:
        """Occupy the places of running units; those on nodes that are gone or overfull are left out."""
        kept = []
        for node_id in held:
            index = self._index.get(node_id)
            if index is not None and _fits(unit, self.free[index]):
                self.take(index, unit)
                kept.append(index)
        return kept

    def take(self, index: int, unit: Vector) -> None:
        self.free[index] = _minus(self.free[index], unit)
        self.reserve(index, unit)

    def give(self, index: int, unit: Vector) -> None:
        """Undo `take`."""
        self.free[index] = _plus(self.free[index], unit)
        self.leave(index, unit)

    def leave(self, index: int, unit: Vector) -> None:
        """A running unit will go: its place can be kept for another, not yet granted."""
        self.future[index] = _plus(self.future[index], unit)
        self._changed(index)

    def reserve(self, index: int, unit: Vector) -> None:
        self.future[index] = _minus(self.future[index], unit)
        self._changed(index)

    def score(self, index: int, unit: Vector) -> float:
        """How empty the node would be with the unit on it: the least is the best fit."""
        return sum(
            (have - need) * weight
            for have, need, weight in zip(self.free[index], unit, self._weights, strict=True)
        )

    def best(self, unit: Vector) -> int | None:
        """The fullest node on which the unit fits now."""
        heap, seen = self._heaps.get(unit, ([], -1))
        stale = range(len(self.ids)) if seen < 0 else sorted(set(self._log[seen:]))
        for index in stale:
            if _fits(unit, self.free[index]) and _fits(unit, self.future[index]):
                heapq.heappush(heap, (self.score(index, unit), index, self._stamps[index]))
        self._heaps[unit] = (heap, len(self._log))
        while heap and heap[0][2] != self._stamps[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def _changed(self, index: int) -> None:
        self._stamps[index] += 1
        self._log.append(index)


def _vector(amounts: Mapping[str, float], kinds: Sequence[str], *, up: bool) -> Vector:
    """Amounts in steps: what is asked for rounded up, what is there rounded down."""
    # The inner rounding takes away the noise of binary fractions (0.1 * 3) before the outer one counts.
    steps = (round(amounts.get(kind, 0.0) * STEPS, 3) for kind in kinds)
    return tuple(int(-(-step // 1)) if up else int(step // 1) for step in steps)


def _fits(unit: Vector, room: Vector) -> bool:
    return all(need <= have or need == 0 for need, have in zip(unit, room, strict=True))


def _plus(left: Vector, right: Vector) -> Vector:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _minus(left: Vector, right: Vector) -> Vector:
    return tuple(a - b for a, b in zip(left, right, strict=True))


def _times(room: Vector, unit: Vector, most: int) -> int:
    """How many such units fit, at most `most`."""
    return max(0, min((have // need for have, need in zip(room, unit, strict=True) if need), default=most))
