"""Why a holder waits, or has what it has, in a sentence or two: a pure function of a decision's snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

from cluster.errors import ShoalError
from cluster.sharing.demand import Demand, Node, place_in_queue
from cluster.sharing.events import UNITS, listed, places, units_of
from cluster.sharing.ledger import Snapshot
from cluster.wording import amounts

SHOWN_NODES = 4
TOLD_S = 600.0
"""For so long it is said how the last unit came."""
_ORDINALS = {1: "1st", 2: "2nd", 3: "3rd"}


@dataclass(frozen=True)
class NodeFacts:
    """What there is for one unit on a node now.

    Attributes:
        free: of what the unit takes.
        units: how many such units fit there now.
        taken: units of each holder that run there, are promised, or leave.
        foreign: what strangers use there.
        avoided: it fails jobs, and is used only where a minimum has no other place.
    """

    node: str
    free: dict[str, float]
    units: int
    taken: dict[str, int]
    foreign: dict[str, float]
    avoided: bool = False


@dataclass(frozen=True)
class Explanation:
    """What is said of a holder, and the facts that it is said from.

    Attributes:
        state: `waiting` (its minimum is not met), `partial` (it would take more), `complete`.
        text: for people.
        waits_s: how long its minimum has not been met.
        queue: the holders whose minimums wait before its own, the first in front.
        nodes: those on which a unit of it could be, the one with most room first.
        hand_over: of the last unit that came, what HandOver.as_json says, and when.
    """

    holder: str
    state: str
    text: str
    granted: int
    min: int
    max: int
    waits_s: float | None = None
    queue: tuple[str, ...] = ()
    overdue: bool = False
    settling: bool = False
    coming: dict[str, int] = field(default_factory=dict)
    nodes: tuple[NodeFacts, ...] = ()
    hand_over: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(snapshot: Snapshot, holder: str) -> Explanation:
    """Say why a holder waits or has what it has.

    Raises:
        ShoalError: nobody of this name has a lease; the message names those who have.
    """
    demand = snapshot.demands.get(holder)
    if demand is None:
        known = listed(sorted(snapshot.demands), most=20) or "nobody"
        raise ShoalError(f"{holder} has no lease; these have one: {known}")
    return _Case(snapshot, demand).explanation()


def queue_before(snapshot: Snapshot, holder: str) -> tuple[str, ...]:
    """The holders whose minimums are not met either, and that go before this one's."""
    own = snapshot.demands[holder]
    place = partial(place_in_queue, priority=snapshot.priority, since=snapshot.since)
    waiting = [
        demand
        for name, demand in snapshot.demands.items()
        if name != holder and len(snapshot.told.get(name, ())) < demand.min
    ]
    return tuple(d.holder for d in sorted(waiting, key=place) if place(d) < place(own))


def node_facts(snapshot: Snapshot, demand: Demand) -> tuple[NodeFacts, ...]:
    """The nodes on which a unit could be if they were empty, the one with most room first."""
    taken: dict[str, Counter[str]] = {}
    for name, other in snapshot.demands.items():
        for place in (*other.held, *snapshot.leaving.get(name, ())):
            taken.setdefault(place, Counter())[name] += 1
    facts = []
    for node in snapshot.nodes:
        there = taken.get(node.node_id, Counter())
        strangers = {
            name: amount
            for name, amount in snapshot.foreign.get(node.node_id, {}).items()
            if demand.unit.get(name)
        }
        if demand.accelerator not in (None, node.accelerator):
            continue
        if _fitting(demand.unit, _with(node, strangers)) == 0:
            continue
        free = _free(node, there, snapshot.demands)
        asked = [name for name, amount in demand.unit.items() if amount]
        facts.append(
            NodeFacts(
                node=node.name,
                free={name: float(free.get(name, 0)) for name in asked},
                units=_units(demand, free, there),
                taken={
                    name: count
                    for name, count in sorted(there.items())
                    if any(snapshot.demands[name].unit.get(kind) for kind in asked)
                },
                foreign=strangers,
                avoided=node.avoided,
            )
        )
    return tuple(sorted(facts, key=lambda each: (-each.units, [-v for v in each.free.values()], each.node)))


def _with(node: Node, strangers: Mapping[str, float]) -> dict[str, Fraction]:
    names = node.resources.keys() | strangers.keys()
    return {name: _exact(node.resources.get(name, 0)) + _exact(strangers.get(name, 0)) for name in names}


def _free(node: Node, taken: Mapping[str, int], demands: Mapping[str, Demand]) -> dict[str, Fraction]:
    free = {name: _exact(amount) for name, amount in node.resources.items()}
    for holder, count in taken.items():
        for name, amount in demands[holder].unit.items():
            free[name] = free.get(name, Fraction(0)) - count * _exact(amount)
    return {name: max(Fraction(0), amount) for name, amount in free.items()}


def _units(demand: Demand, free: Mapping[str, Fraction], there: Mapping[str, int]) -> int:
    """How many more units of a holder fit on a node."""
    fitting = _fitting(demand.unit, free)
    return min(fitting, 1 - min(1, there.get(demand.holder, 0))) if demand.apart else fitting


def _fitting(unit: Mapping[str, float], room: Mapping[str, Fraction]) -> int:
    ways = [room.get(name, Fraction(0)) // _exact(amount) for name, amount in unit.items() if amount]
    return int(min(ways, default=10**6))


def _exact(amount: float | Fraction) -> Fraction:
    return Fraction(round(amount * 10_000), 10_000)


class _Case:
    """The words for one holder."""

    def __init__(self, snapshot: Snapshot, demand: Demand) -> None:
        self.snapshot = snapshot
        self.demand = demand
        self.told = len(snapshot.told.get(demand.holder, ()))
        self.grant = snapshot.grants[demand.holder]
        self.nodes = node_facts(snapshot, demand)
        self.queue = queue_before(snapshot, demand.holder)
        short = Counter(holder.partition("/")[2] or holder for holder in snapshot.demands)
        self.short = {
            holder: name if short[name := holder.partition("/")[2] or holder] == 1 else holder
            for holder in snapshot.demands
        }
        self.names = {node.node_id: node.name for node in snapshot.nodes}

    def explanation(self) -> Explanation:
        demand, snapshot = self.demand, self.snapshot
        if self.told < demand.min:
            state, sentences = "waiting", self._waits()
        elif self.told < demand.most:
            state, sentences = "partial", self._has_some()
        else:
            state, sentences = "complete", self._has_all()
        leaving = snapshot.leaving.get(demand.holder, ())
        if leaving:
            verb = "is" if len(leaving) == 1 else "are"
            where = places(Counter(self.names.get(node, "a node that is gone") for node in leaving))
            sentences.append(f"{units_of(demand.kind, len(leaving))} of it {verb} still leaving {where}")
        told = snapshot.told.get(demand.holder, ())
        if self.grant.gave_way_to and Counter(told) == Counter(self.grant.nodes):
            whom = listed([self._and_why(holder) for holder in self.grant.gave_way_to])
            sentences.append(
                f"it moves to make room for {whom}, and has its place until the next one is ready"
            )
        came, last = snapshot.hand_overs.get(demand.holder, (0.0, None))
        if last is not None and last.giver is not None and snapshot.now - came < TOLD_S:
            sentences.append(f"{snapshot.now - came:.0f} s ago {last.sentence(self._name)}")
        waiting_since = snapshot.waiting_since.get(demand.holder)
        return Explanation(
            holder=demand.holder,
            state=state,
            text=f"{self._name(demand.holder)} " + "; ".join(sentences),
            granted=self.told,
            min=demand.min,
            max=demand.most,
            waits_s=None if waiting_since is None else round(snapshot.now - waiting_since, 3),
            queue=self.queue if state == "waiting" else (),
            overdue=demand.holder in snapshot.overdue,
            settling=demand.holder in snapshot.settling,
            coming=dict(Counter(self.names.get(node, node) for node in self.grant.coming)),
            nodes=self.nodes,
            hand_over=None if last is None else {"at_s_ago": round(snapshot.now - came, 3), **last.as_json()},
        )

    def _name(self, holder: str) -> str:
        return self.short.get(holder, holder.partition("/")[2] or holder)

    # -- the three cases ------------------------------------------------------------------------------------

    def _waits(self) -> list[str]:
        demand = self.demand
        missing = demand.min - self.told
        more = "more " if self.told else ""
        noun = UNITS[demand.kind] if missing == 1 else f"{UNITS[demand.kind]}s"
        verb, each = ("needs", "") if missing == 1 else ("need", " each")
        where = ", each wholly on one node" if missing > 1 else " on one node"
        if demand.apart:
            where = " on a node of its own"
        need = f"{missing} {more}{noun} of {self._unit()}{each} {verb} a place{where}"
        sentences = [f"waits: {need}", *self._why_no_more(missing)]
        if self.queue:
            position = len(self.queue) + 1
            ordinal = _ORDINALS.get(position, f"{position}th")
            sentences.append(
                f"it is {ordinal} in the queue, behind {listed(self._names(self.queue), most=3)}"
            )
        if demand.holder in self.snapshot.overdue:
            sentences.append("it has waited so long that nothing starts any more that is in its way")
        return sentences

    def _has_some(self) -> list[str]:
        demand = self.demand
        sentences = [f"has {self.told} of at most {units_of(demand.kind, demand.most)}"]
        last = self.snapshot.last.get(demand.holder)
        if last is not None and last[1].cause == "gave_way" and sum(last[1].after.values()) == self.told:
            at, event = last
            lost = Counter(event.before) - Counter(event.after)
            ago = f"{max(0.0, self.snapshot.now - at):.0f} s ago"
            whom = listed([self._and_why(holder) for holder in event.by])
            sentences.append(f"it gave way to {whom} with {lost.total()} on {places(lost)} {ago}")
        return sentences + self._why_no_more(min(demand.gang, demand.most - self.told))

    def _has_all(self) -> list[str]:
        demand = self.demand
        if not self.told:
            return ["asks for nothing now"]
        told = self.snapshot.told[demand.holder]
        where = places(Counter(self.names.get(node, node) for node in told))
        avoided = {node.name for node in self.snapshot.nodes if node.avoided and node.node_id in told}
        why = f" (avoided, since jobs fail there: {listed(sorted(avoided))})" if avoided else ""
        return [f"has all it asked for: {units_of(demand.kind, self.told)} on {where}{why}"]

    # -- why it has no more ---------------------------------------------------------------------------------

    def _why_no_more(self, missing: int) -> list[str]:
        """The first reason that holds, for the next so many units."""
        demand, snapshot = self.demand, self.snapshot
        if snapshot.closed:
            return ["the broker was restarted a moment ago, and hears who runs before it grants anything"]
        if self.grant.units > self.told:
            more = units_of(demand.kind, self.grant.units - self.told)
            return [f"{more} more can start: it is told so when it asks next, in a moment"]
        if not self.nodes:
            kind = f" with {demand.accelerator}" if demand.accelerator is not None else ""
            return [f"no node{kind} that is there has {self._unit()}"]
        if self.grant.coming:
            where = places(Counter(self.names.get(node, node) for node in self.grant.coming))
            return [f"a place is kept for it on {where}, until what is there has left"]
        waits = self.told < demand.min  # a minimum may have what is avoided
        if sum(each.units for each in self.nodes if waits or not each.avoided) >= missing:
            return [self._kept_from_it()]
        return [self._node_words()]

    def _kept_from_it(self) -> str:
        """There is room, but it is not for this holder now."""
        demand, snapshot = self.demand, self.snapshot
        if self.told >= demand.min and demand.holder in snapshot.settling:
            return "it changed a moment ago, and settles before it takes more"
        others = [name for name in snapshot.demands if name != demand.holder]
        overdue = sorted(name for name in others if name in snapshot.overdue)
        if overdue:
            waited = listed(self._names(overdue), most=3)
            return f"what is free is kept clear for {waited}, which has waited longer"
        coming = sorted(name for name in others if snapshot.grants[name].coming)
        if coming:
            return f"what is free is kept for {listed(self._names(coming), most=3)}"
        return "what is free is not granted to it at this moment; that is decided anew at every change"

    def _node_words(self) -> str:
        words = []
        for each in self.nodes[:SHOWN_NODES]:
            by = [f"{self._name(holder)} holds {count}" for holder, count in each.taken.items()]
            by += [f"strangers use {amounts(each.foreign)}"] if any(each.foreign.values()) else []
            by += ["it is avoided, since jobs fail there"] if each.avoided else []
            free = " and ".join(f"{amount:g} {name}" for name, amount in sorted(each.free.items()))
            words.append(f"{each.node} has {free} free" + (f" ({listed(by)})" if by else ""))
        rest = len(self.nodes) - SHOWN_NODES
        return ", ".join(words) + (f", and {rest} more nodes have no more" if rest > 0 else "")

    def _and_why(self, holder: str) -> str:
        """A holder that was given way to, with what put it first, where that is known still."""
        other, name = self.snapshot.demands.get(holder), self._name(holder)
        if other is None:
            return name
        if other.kind != self.demand.kind and other.kind == self.snapshot.priority:
            return f"{name} ({other.kind} goes first)"
        if other.kind == self.demand.kind and other.priority > self.demand.priority:
            return f"{name} (its priority is {other.priority})"
        return name

    def _unit(self) -> str:
        kind = f" with {self.demand.accelerator}" if self.demand.accelerator is not None else ""
        return f"{amounts(self.demand.unit)}{kind}"

    def _names(self, holders: tuple[str, ...] | list[str]) -> list[str]:
        return [self._name(holder) for holder in holders]
