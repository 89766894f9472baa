"""The leases: who asked for what, when they were last heard, and what they were told; no Ray, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.sharing.allocate import allocate
from cluster.sharing.demand import Demand, Grant, Kind, Node
from cluster.sharing.events import Cause, Event, Units
from cluster.sharing.foreign import countable
from cluster.sharing.hand_overs import HandOver
from cluster.sharing.lease import Lease
from cluster.sharing.ledger_notes import LedgerNotes
from cluster.wording import amounts

TTL_S = 15.0
"""Seconds after which a holder that was not heard of loses its lease."""
PATIENCE_S = 60.0
SETTLE_S = 10.0
_LEAVING = "\0leaving"
"""Ends the name under which the units of a holder are allocated that were told to go."""


@dataclass(frozen=True)
class Snapshot:
    """All that a decision was made from, and what it was, for whoever explains it.

    Attributes:
        demands: of each holder, `held` as the allocation sees it: what runs and what is promised.
        told: what each holder was told last.
        grants: what each would be told now.
        since: when each asked first; `waiting_since`: since when its minimum is not met.
        foreign: what strangers use of each node, by node id; it is not in the nodes' resources.
        last: the last event of each holder that changed its grant, with its time.
        hand_overs: the last unit of each holder that began to run, with the time of that.
    """

    now: float
    priority: Kind
    nodes: tuple[Node, ...]
    demands: Mapping[str, Demand]
    told: Mapping[str, tuple[str, ...]]
    grants: Mapping[str, Grant]
    leaving: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)
    waiting_since: Mapping[str, float] = field(default_factory=dict)
    overdue: frozenset[str] = frozenset()
    settling: frozenset[str] = frozenset()
    foreign: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    last: Mapping[str, tuple[float, Event]] = field(default_factory=dict)
    hand_overs: Mapping[str, tuple[float, HandOver]] = field(default_factory=dict)
    closed: bool = False
    """The broker was restarted a moment ago, and hears everybody before it grants anything."""


class Ledger:
    """Keeps the demands, and tells each holder its grant.

    A grant is a promise: from the moment a holder was told, its units count as taken, whether they run
    yet or not, until the holder asks for less, releases them, or was not heard of for `ttl_s`. A unit that
    the allocation takes back stays taken until its holder was told *and* no longer names it in `held`;
    `held` therefore names the units that run or are being started. See Lease for how the two are matched.

    Times are seconds of any clock that does not go backwards; they are passed in. A ledger that starts
    empty beside holders that run already (its predecessor died) is given `closed_until`: before that
    moment everyone keeps what runs and nobody is granted anything new, so that all can be heard first.

    Args:
        patience_s: how long a minimum waits until nodes are kept clear of other starts for it.
        settle_s: least time between two changes of a training holder's grant for the sake of wants. Each
            change of the grant that it is told starts this time, the first grant included; only the loss of
            a node does not, so that what was lost is replaced at once. Minimums, and what a tenant or a
            priority that goes first needs, are never held up.
    """

    def __init__(
        self,
        priority: Kind,
        *,
        ttl_s: float = TTL_S,
        patience_s: float = PATIENCE_S,
        settle_s: float = SETTLE_S,
        closed_until: float | None = None,
    ) -> None:
        self.priority: Kind = priority
        self.ttl_s = ttl_s
        self.patience_s = patience_s
        self.settle_s = settle_s
        self._closed_until = closed_until
        self._nodes: tuple[Node, ...] = ()
        self._alive: frozenset[str] = frozenset()
        self._foreign: dict[str, dict[str, float]] = {}
        self._leases: dict[str, Lease] = {}
        self._grants: dict[str, Grant] | None = None
        self.changes = 0
        """How often something has changed from which grants may follow."""
        self._decided_with: tuple[object, ...] = ()
        self._overdue_told: frozenset[str] = frozenset()
        self._notes = LedgerNotes()

    # -- what happens ---------------------------------------------------------------------------------------

    def update_nodes(
        self, nodes: Sequence[Node], foreign: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Say which nodes are alive now.

        Args:
            nodes: with all they have.
            foreign: what strangers use, by node id, in Ray's names. It is not granted, unless that would
                take from a lease: whoever was not heard of for a while may have been taken for a stranger.
        """
        strangers = {node: dict(used) for node, used in (foreign or {}).items() if used}
        if tuple(nodes) == self._nodes and strangers == self._foreign:
            return
        before = {node.node_id: node for node in self._nodes}
        used, self._foreign = self._foreign, strangers
        self._nodes = tuple(nodes)
        self._alive = frozenset(node.node_id for node in nodes)
        self._undecide()
        back = {node.node_id for node in nodes if node.node_id in self._notes.names}
        self._notes.names |= _distinct_names(nodes)
        taken = {self._notes.names[node.node_id] for node in nodes}
        for node_id, name in self._notes.names.items():
            if name in taken and node_id not in self._alive:  # a node that is gone leaves its name to another
                self._notes.names[node_id] = f"{name}~{node_id[:8]}"
        for node in nodes:
            was = before.pop(node.node_id, None)
            name, has = self._notes.names[node.node_id], amounts(countable(node.resources))
            if was is None and node.node_id in back:
                self._note_node("node_back", node, f"{name} is back, with {has}")
            elif was is None:
                self._note_node("node_joined", node, f"{name} is there, with {has}")
            elif used.get(node.node_id) != strangers.get(node.node_id):
                by = amounts(strangers.get(node.node_id, {}))
                self._note_node("foreign_use", node, f"strangers use {by} of the {has} of {name}")
            elif replace(was, avoided=node.avoided) != node:
                self._note_node("node_changed", node, f"{name} has {has} now")
        for node in before.values():
            self._note_node(
                "node_gone", replace(node, resources={}), f"{self._notes.names[node.node_id]} is gone"
            )

    def request(self, demand: Demand, now: float) -> Grant:
        """Register or refresh a demand; returns what its holder may run now."""
        self.expire(now)
        lease = self._leases.get(demand.holder)
        new = lease is None
        if lease is None:
            lease = self._leases[demand.holder] = Lease(demand, since=now, heard=now)
            self._undecide()
        old, held = lease.told, self._notes.units(lease.demand) if not new else Units({}, {})
        if lease.demand != demand:
            self._undecide()
        lease.renew(demand, now, {node.node_id for node in self._nodes if node.avoided})
        grant = lease.tellable(self._decide(now)[demand.holder], self._alive)
        waited = lease.waiting_since is not None
        if old != grant.nodes:
            self._undecide()
        lease.tell(grant, self._alive, now)
        cause = None if Counter(old or ()) == Counter(grant.nodes) else self._cause(lease, grant, old)
        self._notes.grant(lease, grant, old, held, cause, now, waited=waited)
        self._notes.hand_overs(lease, grant, old, now)
        return grant

    def release(self, holder: str) -> None:
        """Forget a holder; nothing happens when it is not known."""
        self._forget(holder, "released", f"{holder} ended its lease")

    def expire(self, now: float) -> list[str]:
        """Forget the holders that were not heard of for `ttl_s`; returns them."""
        gone = [holder for holder, lease in self._leases.items() if now - lease.heard > self.ttl_s]
        for holder in gone:
            reason = f"{holder} was not heard of for {self.ttl_s:g} s, and lost its lease"
            self._forget(holder, "expired", reason)
        return gone

    # -- what is known --------------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        return self._notes.take()

    def occupied(self) -> dict[str, dict[str, float]]:
        """Per node id, how much of each resource the leases take: what runs, is promised or leaves."""
        taken: dict[str, dict[str, float]] = {}
        for lease in self._leases.values():
            standing = lease.standing(self._alive)
            for node in (*standing.demand.held, *standing.leaving):
                there = taken.setdefault(node, {})
                for name, amount in lease.demand.unit.items():
                    there[name] = there.get(name, 0.0) + amount
        return taken

    def leases(self, now: float) -> list[dict[str, Any]]:
        """One row a holder, by name: `granted` and `nodes` as it was told, `wants` what it would take."""
        self.expire(now)
        return [
            {
                "holder": holder,
                "kind": lease.demand.kind,
                "min": lease.demand.min,
                "max": lease.demand.max,
                "granted": len(lease.told or ()),
                "wants": lease.demand.most,
                "nodes": list(lease.told or ()),
            }
            for holder, lease in sorted(self._leases.items())
        ]

    def would_tell(self, holder: str, now: float) -> Grant | None:
        """What a holder would be told now, if it asked for the same again; None where it has no lease."""
        lease = self._leases.get(holder)
        return None if lease is None else lease.tellable(self._decide(now)[holder], self._alive)

    def preview(self, demand: Demand, now: float) -> Grant | None:
        """What a holder that has no lease would be granted if it asked now, which it does not; None: nobody
        who is new is granted anything yet."""
        if demand.holder in self._leases or self._closed(now):
            return None
        demands, promised = self._demands(closed=False)
        since = {holder: lease.since for holder, lease in self._leases.items()}
        grants = allocate(
            self._grantable(),
            [*demands, demand],
            self.priority,
            since={**since, demand.holder: now},
            promised=promised,
            overdue=self._overdue(now),
            settling=self._settling(now),
        )
        return grants[demand.holder]

    def snapshot(self, now: float) -> Snapshot:
        """All that the decision of this moment follows from."""
        self.expire(now)
        grants = self._decide(now)
        standings = {name: lease.standing(self._alive) for name, lease in self._leases.items()}
        return Snapshot(
            now=now,
            priority=self.priority,
            nodes=tuple(replace(node, name=self._notes.names[node.node_id]) for node in self._grantable()),
            demands={name: standing.demand for name, standing in standings.items()},
            told={name: lease.told or () for name, lease in self._leases.items()},
            grants={name: grant for name, grant in grants.items() if name in self._leases},
            leaving={name: standing.leaving for name, standing in standings.items() if standing.leaving},
            since={name: lease.since for name, lease in self._leases.items()},
            waiting_since={
                name: lease.waiting_since
                for name, lease in self._leases.items()
                if lease.waiting_since is not None
            },
            overdue=self._overdue(now),
            settling=self._settling(now),
            foreign=self._foreign,
            last=dict(self._notes.last),
            hand_overs=dict(self._notes.last_hand_over),
            closed=self._closed(now),
        )

    # -- the decision ---------------------------------------------------------------------------------------

    def _decide(self, now: float) -> dict[str, Grant]:
        closed, overdue, settling = self._closed(now), self._overdue(now), self._settling(now)
        if self._grants is not None and self._decided_with == (closed, overdue, settling):
            return self._grants
        self._decided_with = (closed, overdue, settling)
        demands, promised = self._demands(closed)
        since = {holder: lease.since for holder, lease in self._leases.items()}
        self._grants = allocate(
            self._grantable(),
            demands,
            self.priority,
            since=since,
            promised=promised,
            overdue=overdue,
            settling=settling,
        )
        self._notes.overdue([self._leases[holder] for holder in sorted(overdue - self._overdue_told)], now)
        self._overdue_told = overdue
        return self._grants

    def _demands(self, closed: bool) -> tuple[list[Demand], dict[str, tuple[int, ...]]]:
        """What everybody asks for as the allocation sees it, and what of that is only promised."""
        demands: list[Demand] = []
        promised = {}
        for holder, lease in self._leases.items():
            standing = lease.standing(self._alive)
            demand = standing.demand
            if closed:
                demand = replace(demand, min=0, max=len(demand.held))
            demands.append(demand)
            promised[holder] = standing.promised
            if standing.leaving:
                leaving = replace(
                    demand, holder=holder + _LEAVING, min=0, max=0, held=standing.leaving, gang=1
                )
                demands.append(leaving)
        return demands, promised

    def _undecide(self) -> None:
        self._grants = None
        self.changes += 1

    def _grantable(self) -> list[Node]:
        """The nodes without what strangers use."""
        if not self._foreign:
            return list(self._nodes)
        occupied, nodes = self.occupied(), []
        for node in self._nodes:
            has, own = dict(node.resources), occupied.get(node.node_id, {})
            for name, amount in self._foreign.get(node.node_id, {}).items():
                total = has.get(name, 0.0)
                has[name] = max(total - amount, min(total, own.get(name, 0.0)))
            nodes.append(replace(node, resources=has))
        return nodes

    def _closed(self, now: float) -> bool:
        return self._closed_until is not None and now < self._closed_until

    def _overdue(self, now: float) -> frozenset[str]:
        return frozenset(
            holder
            for holder, lease in self._leases.items()
            if lease.waiting_since is not None and now - lease.waiting_since >= self.patience_s
        )

    def _settling(self, now: float) -> frozenset[str]:
        return frozenset(
            holder
            for holder, lease in self._leases.items()
            if lease.demand.kind == "training"
            and lease.changed is not None
            and now - lease.changed < self.settle_s
        )

    def _note_node(self, cause: Cause, node: Node, reason: str) -> None:
        self._notes.node(cause, node, reason, self._foreign.get(node.node_id, {}))

    def _forget(self, holder: str, cause: Cause, reason: str) -> None:
        lease = self._leases.pop(holder, None)
        if lease is not None:
            self._undecide()
            self._notes.forget(lease, cause, reason)

    def _cause(self, lease: Lease, grant: Grant, old: tuple[str, ...] | None) -> Cause:
        """Why the grant is another than before."""
        demand, alive = lease.demand, self._alive
        lost = Counter(old or ()) - Counter(grant.nodes)
        if old is None and demand.held:
            return "found"
        if not old:
            return "started"
        if not lost:
            return "grew"
        if any(node not in alive for node in lost):
            return "node_gone"
        if grant.gave_way_to:
            return "gave_way"
        if demand.kind == "training" and lost.keys() <= {n.node_id for n in self._nodes if n.avoided}:
            return "avoided"
        if grant.units == demand.most < len(old):
            return "asked_less"
        if demand.kind == "serving" and grant.units == len(old):
            return "placed_elsewhere"
        return "place_taken"


def _distinct_names(nodes: Iterable[Node]) -> dict[str, str]:
    """What to call each node: its name, with a part of its id where others have the same."""
    names = {node.node_id: node.name or node.node_id for node in nodes}
    several = {name for name, count in Counter(names.values()).items() if count > 1}
    return {node: f"{name}~{node[:8]}" if name in several else name for node, name in names.items()}
