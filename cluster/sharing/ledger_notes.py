"""What a ledger tells of: every change of a grant, of what is held, and of nodes, as events; no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from cluster.sharing.demand import Demand, Grant, Node
from cluster.sharing.events import Cause, Event, Units, grant_reason, held_reason, units_of
from cluster.sharing.foreign import countable
from cluster.sharing.hand_overs import HandOver, HandOvers, Saying
from cluster.sharing.lease import Lease
from cluster.wording import amounts


class LedgerNotes:
    """The events that nobody has taken yet, and the last ones of each holder.

    Attributes:
        names: what nodes are called, by id.
        last: the last event of each holder that changed its grant, with its time.
        last_hand_over: the last unit of each holder that began to run, with the time of that.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.last: dict[str, tuple[float, Event]] = {}
        self.last_hand_over: dict[str, tuple[float, HandOver]] = {}
        self._events: list[Event] = []
        self._hand_overs = HandOvers()

    def take(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def units(self, demand: Demand) -> Units:
        """What a holder names, by the names of nodes."""
        return Units(self._by_node(demand.held), self._by_node(demand.starting))

    def node(self, cause: Cause, node: Node, reason: str, foreign: Mapping[str, float]) -> None:
        """Something happened to a node."""
        resources, name = countable(node.resources), self.names[node.node_id]
        self._events.append(Event(cause, reason, node=name, resources=resources, foreign=foreign))

    def overdue(self, leases: Iterable[Lease], now: float) -> None:
        """These have waited for too long."""
        for lease in leases:
            demand, waited = lease.demand, now - (lease.waiting_since or now)
            reason = (
                f"{demand.holder} has waited for {waited:.0f} s: nothing starts any more that is in its way"
            )
            told, units = self._by_node(lease.told or ()), self.units(demand)
            words = (demand.holder, demand.kind, demand.unit, told, told, units.held)
            self._events.append(Event("overdue", reason, *words, starting=units.starting))

    def forget(self, lease: Lease, cause: Cause, reason: str) -> None:
        """A lease has ended."""
        demand = lease.demand
        for known in (self.last, self.last_hand_over):
            known.pop(demand.holder, None)
        self._hand_overs.release(demand.holder)
        before = self._by_node(lease.told or ())
        self._events.append(Event(cause, reason, demand.holder, demand.kind, demand.unit, before=before))

    def grant(
        self,
        lease: Lease,
        grant: Grant,
        old: tuple[str, ...] | None,
        old_units: Units,
        cause: Cause | None,
        now: float,
        *,
        waited: bool,
    ) -> None:
        """A holder was told a grant.

        Args:
            old, old_units: what it was told before, and had named.
            cause: why the grant is another one than before; None where it is not.
            waited: its minimum had no room before.
        """
        demand = lease.demand
        before, after = self._by_node(old or ()), self._by_node(grant.nodes)
        units = self.units(demand)
        told = (demand.holder, demand.kind, demand.unit, before, after, units.held)
        if cause is not None and before != after:
            by = grant.gave_way_to if cause == "gave_way" else ()
            words = (demand.holder, demand.kind, before, after, by, demand.most)
            event = Event(cause, grant_reason(cause, *words), *told, by, units.starting)
            self.last[demand.holder] = (now, event)
            self._events.append(event)
        elif units != old_units:
            reason = held_reason(demand.holder, demand.kind, old_units, units)
            self._events.append(Event("held", reason, *told, starting=units.starting))
        if lease.waiting_since is not None and not waited:
            least = units_of(demand.kind, demand.min)
            reason = f"{demand.holder} waits: there is no room now for {least} of {amounts(demand.unit)} each"
            now_told = (demand.holder, demand.kind, demand.unit, after, after, units.held)
            self._events.append(Event("waiting", reason, *now_told, starting=units.starting))

    def hand_overs(self, lease: Lease, grant: Grant, old: tuple[str, ...] | None, now: float) -> None:
        """See which of its units run that did not before; those that somebody made room for are told of."""
        demand, units = lease.demand, self.units(lease.demand)
        held, running = Counter(units.held), Counter(units.running)
        before, after = Counter(self._by_node(old or ())), Counter(self._by_node(grant.nodes))
        if old is None:
            before += held  # it ran before it was heard of
        by, told = grant.gave_way_to, dict(after)
        word = Saying(demand.holder, demand.kind, demand.most, before, after, held, running, by)
        for found in self._hand_overs.hear(word, now):
            self.last_hand_over[demand.holder] = now, found
            if found.giver is not None:
                words = (demand.holder, demand.kind, demand.unit, told, told, units.held)
                event = Event("handed_over", found.sentence(), *words, starting=units.starting)
                self._events.append(replace(event, facts=found.as_json()))

    def _by_node(self, units: Iterable[str]) -> dict[str, int]:
        count = Counter(self.names.get(node, node) for node in units)
        return dict(sorted(count.items()))
