"""The demands while they are being decided: what each holder has so far, gang by gang, and where."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.sharing.demand import Demand, Grant, Kind, Tier, tier_of
from cluster.sharing.room import Room, Scale, Vector, fits, scaled, times


@dataclass(eq=False)
class PlacedGang:
    """Units that come and go together.

    Attributes:
        places: the node index of each unit.
        runs: its units run or are being started; not so one that was only promised.
        fresh: it is new in this decision.
        now: its units are granted; not so of one whose places are kept until others have left.
    """

    claim: Claim
    places: list[int]
    runs: bool = False
    fresh: bool = False
    now: bool = True
    serial: int = field(default_factory=itertools.count().__next__)
    """Greater than that of all gangs before it."""

    @property
    def bears(self) -> bool:
        """Whether its holder may be left with it: it runs, or can in the stead of one that moves."""
        return self.runs or (self.now and bool(self.claim.evicted))

    @property
    def whole(self) -> bool:
        return len(self.places) == self.claim.demand.gang


@dataclass(eq=False)
class Claim:
    """One demand, and what is granted of it so far.

    Attributes:
        order: where it stands in the queue for minimums.
        tier: whose wants come first: less is earlier. Of an earlier tier nothing is taken for a later one.
        settling: it changed a moment ago, and is left alone by its equals.
    """

    demand: Demand
    unit: Vector
    order: int
    tier: int
    share: float
    settling: bool = False
    gangs: list[PlacedGang] = field(default_factory=list)
    broken: list[PlacedGang] = field(default_factory=list)
    waits: bool = False
    """Its minimum is not met."""
    gave_way_to: set[str] = field(default_factory=set)
    evicted: list[PlacedGang] = field(default_factory=list)
    """Gangs that run and are not among `gangs` any more, for the sake of others."""

    @property
    def least(self) -> int:
        """Gangs of its minimum."""
        return self.demand.min // self.demand.gang

    @property
    def most(self) -> int:
        """Gangs that it would take."""
        return self.demand.most // self.demand.gang

    @property
    def bearing(self) -> int:
        """Gangs that it may be left with."""
        return sum(gang.bears for gang in self.gangs)

    @property
    def runs(self) -> bool:
        """Whether anything of it runs, and be it on its way out."""
        return any(gang.runs for gang in (*self.gangs, *self.evicted))

    @property
    def in_transit(self) -> bool:
        """Gangs of its minimum move, and wait for others to leave: nothing more is taken from it."""
        return bool(self.evicted) and self.bearing < self.least

    def level(self, gangs: int) -> tuple[float, int]:
        """What it would have with so many gangs, as a weighted dominant share; those with less go first."""
        units = gangs * self.demand.gang
        return units * self.share / self.demand.weight, units

    def grant(self, room: Room) -> Grant:
        granted = self._granted()
        coming = [gang for gang in self.gangs if gang not in granted]
        return Grant(
            self.demand.holder,
            tuple(room.ids[index] for gang in granted for index in gang.places),
            coming=tuple(room.ids[index] for gang in coming for index in gang.places),
            gave_way_to=tuple(sorted(self.gave_way_to)),
        )

    def _granted(self) -> list[PlacedGang]:
        """The gangs that it may run now; of those evicted, the ones that stay until others run instead."""
        can_run = [gang for gang in self.gangs if gang.now]
        if not self.evicted or not self.least or not self.gangs:
            starts = not self.runs and not all(gang.now for gang in self.gangs[: self.least])
            return [] if starts else can_run
        missing = max(0, self.least - len(can_run))
        if self.demand.rebuilds:
            if not missing:
                return can_run
            # It stops whenever it changes, and so changes once: when all places are free.
            can_run = [gang for gang in can_run if gang.runs]
            return [*self.evicted[: self.most - len(can_run)], *can_run]
        if not any(gang.runs for gang in can_run):
            missing = max(1, missing)
        staying = self.evicted[-missing:] if missing else []
        return [*staying, *can_run[: self.most - len(staying)]]


class Crowd:
    """All claims, and which gangs stand on which node; every change can be taken back by the room."""

    def __init__(self, room: Room, claims: Sequence[Claim]) -> None:
        self.room = room
        self.claims = claims
        self._on_node: dict[int, list[PlacedGang]] | None = None

    def on_node(self, index: int) -> Sequence[PlacedGang]:
        """Whole gangs with a unit on this node, in no order."""
        return self._by_node().get(index, ())

    def occupied(self) -> Collection[int]:
        """Nodes on which anything stands."""
        return self._by_node().keys()

    def add(self, gang: PlacedGang) -> None:
        """Make a gang, whose places are taken already, one of its claim's."""
        gang.claim.gangs.append(gang)
        self._enter(gang)
        self.room.note(self._forget, gang)

    def evict(self, gang: PlacedGang, sake: str) -> None:
        """Take a gang out of its claim's grant, for the sake of another holder."""
        claim = gang.claim
        position = claim.gangs.index(gang)
        del claim.gangs[position]
        self._leave(gang)
        self.room.note(self._return, gang, position)
        if gang.runs:
            claim.evicted.append(gang)
            self.room.note(claim.evicted.remove, gang)
        for index in gang.places:
            if gang.fresh and gang.now:
                self.room.give(index, claim.unit)
            else:  # it may run, or be starting at this moment
                self.room.leave(index, claim.unit)
        if not gang.fresh and sake not in claim.gave_way_to:
            claim.gave_way_to.add(sake)
            self.room.note(claim.gave_way_to.discard, sake)

    def restore(self, gang: PlacedGang) -> bool:
        """Let a gang that was evicted stay after all, where it fits still."""
        claim, mark = gang.claim, self.room.mark()
        for index in gang.places:
            started = not (gang.fresh and gang.now)
            if not fits(claim.unit, self.room.future[index]) or not (
                started or fits(claim.unit, self.room.free[index])
            ):
                self.room.rollback(mark)
                return False
            (self.room.reserve if started else self.room.take)(index, claim.unit)
        self.add(gang)
        if gang.runs:
            claim.evicted.remove(gang)
            self.room.note(claim.evicted.append, gang)
        return True

    def _forget(self, gang: PlacedGang) -> None:
        gang.claim.gangs.remove(gang)
        self._leave(gang)

    def _return(self, gang: PlacedGang, position: int) -> None:
        gang.claim.gangs.insert(position, gang)
        self._enter(gang)

    def _enter(self, gang: PlacedGang) -> None:
        if self._on_node is not None:
            for index in set(gang.places):
                self._on_node.setdefault(index, []).append(gang)

    def _leave(self, gang: PlacedGang) -> None:
        if self._on_node is not None:
            for index in set(gang.places):
                self._on_node[index].remove(gang)

    def _by_node(self) -> dict[int, list[PlacedGang]]:
        # Most decisions find room for everybody and never ask who is where.
        if self._on_node is None:
            self._on_node = {}
            for claim in self.claims:
                for gang in claim.gangs:
                    self._enter(gang)
        return self._on_node


def make_claims(
    demands: Iterable[Demand],
    tiers: Sequence[Tier],
    scale: Scale,
    room: Room,
    priority: Kind,
    settling: Collection[str],
) -> list[Claim]:
    """One claim of each demand, in the order given."""
    claims = []
    for order, demand in enumerate(demands):
        unit = scale.unit(demand)
        tier = tiers.index(tier_of(demand, priority))
        share = room.dominant_share(unit)
        claims.append(Claim(demand, unit, order, tier, share, settling=demand.holder in settling))
    return claims


def keep_running(room: Room, claims: Sequence[Claim], promised: Mapping[str, Collection[int]]) -> None:
    """Let running units stay where they are, as far as they are wanted; then those that were promised."""
    later: list[PlacedGang] = []
    for claim in claims:
        size, held = claim.demand.gang, claim.demand.held
        awaited = promised.get(claim.demand.holder, ())
        for first in range(0, len(held), size):
            places = [room.index.get(node, -1) for node in held[first : first + size]]
            gang = PlacedGang(
                claim, places, runs=not any(unit in awaited for unit in range(first, first + size))
            )
            if gang.runs:
                _stay(room, gang)
            else:
                later.append(gang)
    for gang in later:
        _stay(room, gang)
    for claim in claims:
        for gang in claim.gangs[claim.most :]:
            for index in gang.places:
                room.leave(index, claim.unit)
        del claim.gangs[claim.most :]


def _stay(room: Room, gang: PlacedGang) -> None:
    """Occupy what a gang has; units on nodes that are gone, or overfull, are left out of it."""
    claim, here = gang.claim, []
    for index, count in Counter(gang.places).items():
        stays = min(count, times(room.free[index], claim.unit)) if index >= 0 else 0
        if stays:
            room.take(index, scaled(claim.unit, stays))
            here += [index] * stays
    gang.places = here
    if gang.whole:
        claim.gangs.append(gang)
    elif here:
        claim.broken.append(gang)
