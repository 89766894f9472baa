"""The leases: who asked for what, when they were last heard, and what they were told; no Ray, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.sharing.allocate import allocate
from cluster.sharing.demand import Demand, Grant, Kind, Node

TTL_S = 15.0
"""Seconds after which a holder that was not heard of loses its lease."""


@dataclass
class _Lease:
    demand: Demand
    since: float
    heard: float
    told: tuple[str, ...] = ()
    """The nodes of the last grant that the holder was given: it may have started any of these units."""

    def running(self) -> list[str]:
        """The units that run, those that were granted first (in the order of the grant)."""
        left = Counter(self.demand.held)
        ordered = []
        for node in (*self.told, *self.demand.held):
            if left[node] > 0:
                left[node] -= 1
                ordered.append(node)
        return ordered

    def promised(self) -> list[str]:
        """The units that were granted and do not run yet, as far as the holder still wants them."""
        left = Counter(self.demand.held)
        promised = []
        for node in self.told:
            if left[node] > 0:
                left[node] -= 1
            else:
                promised.append(node)
        return promised[: max(0, max(self.demand.min, self.demand.max) - len(self.demand.held))]


class Ledger:
    """Keeps the demands, and tells each holder its grant.

    A grant is a promise: from the moment a holder was told, its units count as taken, whether they run
    yet or not, until the holder asks for less, releases them, or was not heard of for `ttl_s`. A unit that
    the allocation takes back stays taken until its holder was told *and* no longer names it in `held`;
    `held` therefore names the units that run or are being started.

    Times are seconds of any clock that does not go backwards; they are passed in. A ledger that starts
    empty beside holders that run already (its predecessor died) is given `closed_until`: before that
    moment everyone keeps what runs and nobody is granted anything new, so that all can be heard first.
    """

    def __init__(self, priority: Kind, *, ttl_s: float = TTL_S, closed_until: float | None = None) -> None:
        self.priority: Kind = priority
        self.ttl_s = ttl_s
        self._closed_until = closed_until
        self._nodes: tuple[Node, ...] = ()
        self._leases: dict[str, _Lease] = {}
        self._grants: dict[str, Grant] | None = None

    def update_nodes(self, nodes: Sequence[Node]) -> None:
        """Say which nodes are alive now."""
        if tuple(nodes) != self._nodes:
            self._nodes = tuple(nodes)
            self._grants = None

    def request(self, demand: Demand, now: float) -> Grant:
        """Register or refresh a demand; returns what its holder may run now."""
        lease = self._leases.get(demand.holder)
        if lease is None:
            lease = self._leases[demand.holder] = _Lease(demand, since=now, heard=now)
            self._grants = None
        elif lease.demand != demand:
            lease.demand = demand
            self._grants = None
        lease.heard = now
        self.expire(now)
        grant = self._decide(now)[demand.holder]
        if lease.told != grant.nodes:
            lease.told = grant.nodes
            self._grants = None
        return grant

    def release(self, holder: str) -> None:
        """Forget a holder; nothing happens when it is not known."""
        if self._leases.pop(holder, None) is not None:
            self._grants = None

    def expire(self, now: float) -> list[str]:
        """Forget the holders that were not heard of for `ttl_s`; returns them."""
        gone = [holder for holder, lease in self._leases.items() if now - lease.heard > self.ttl_s]
        for holder in gone:
            self.release(holder)
        return gone

    def leases(self, now: float) -> list[dict[str, Any]]:
        """One row a holder, by name: `granted` and `nodes` as it was told, `wants` what it would take."""
        self.expire(now)
        return [
            {
                "holder": holder,
                "kind": lease.demand.kind,
                "min": lease.demand.min,
                "max": lease.demand.max,
                "granted": len(lease.told),
                "wants": max(lease.demand.min, lease.demand.max),
                "nodes": list(lease.told),
            }
            for holder, lease in sorted(self._leases.items())
        ]

    def _decide(self, now: float) -> dict[str, Grant]:
        closed = self._closed_until is not None and now < self._closed_until
        if self._closed_until is not None and not closed:
            self._closed_until = None
            self._grants = None
        if self._grants is None:
            running = {holder: lease.running() for holder, lease in self._leases.items()}
            promised = {holder: lease.promised() for holder, lease in self._leases.items()}
            demands = []
            for holder, lease in self._leases.items():
                held = (*running[holder], *promised[holder])
                demand = replace(lease.demand, held=held)
                demands.append(replace(demand, min=0, max=len(held)) if closed else demand)
            self._grants = allocate(
                self._nodes,
                demands,
                self.priority,
                since={holder: lease.since for holder, lease in self._leases.items()},
                promised={
                    holder: range(len(running[holder]), len(running[holder]) + len(units))
                    for holder, units in promised.items()
                },
            )
        return self._grants
