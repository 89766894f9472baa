"""The broker: the one actor of a cluster that keeps the leases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.head_actor import as_here, start_on_head, was_restarted
from cluster.ray_private import available_resources_by_node, draining_nodes
from cluster.sharing.demand import Demand, Grant, Node
from cluster.sharing.events import Event
from cluster.sharing.explain import explain
from cluster.sharing.foreign import ForeignUse, countable
from cluster.sharing.growth import NodeKind, nodes_of_use
from cluster.sharing.journal import Journal, journal_storage
from cluster.sharing.ledger import PATIENCE_S, SETTLE_S, Ledger
from cluster.sharing.listening_clock import ListeningClock
from cluster.sharing.node_health import FAILURES, Against, NodeHealth, Report, remembered
from cluster.state.health import silent
from cluster.state.nodes import KIND_LABEL, accelerator_of, name_of

BROKER_NAME = "shoal-broker"
NODES_EVERY_S = 1.0
"""The list of nodes is read at most this often."""
SUSPECTS_EVERY_S = 5.0
"""How often a node that did not answer is asked again."""
ANSWER_TIMEOUT_S = 2.0
WATCH_LEAST_S = 0.02
"""Between an answer and the next news of it, so that who watches does not ask without a pause."""
GRACE_S = 3.0
"""Seconds after a restart in which nothing new is granted, so that those who run are heard first."""


class Broker:
    """The actor: a ledger, a clock, Ray's list of nodes, and the log of events.

    It hears one caller at a time. While it stands still, or waits for Ray, everybody is silent to it: that
    time does not count (see ListeningClock).

    Args:
        info: facts about the cluster that whoever runs inside it asks for (`name`, `storage`,
            `gateway_host`, `gateway_port`, `dashboard_url`); `priority` decides whose wants come first,
            `patience_s` and `settle_s` are the ledger's times; `avoid_after` is the number of failures after
            which a node is avoided; where nodes are `probed`, nothing is granted on one before it was.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._info = as_here(info)
        self._clock = ListeningClock()
        self._clock.start()
        now = self._clock.now()
        # A first start knows that there is nobody; a restart does not know who runs.
        restarted = was_restarted()
        self._ledger = Ledger(
            self._info.get("priority", "serving"),
            patience_s=self._info.get("patience_s", PATIENCE_S),
            settle_s=self._info.get("settle_s", SETTLE_S),
            closed_until=now + GRACE_S if restarted else None,
        )
        self._foreign = ForeignUse()
        self._strangers: dict[str, dict[str, float]] = {}
        self._journal = Journal(journal_storage(self._info["storage"], self._info["name"]))
        self._health = NodeHealth(self._info.get("avoid_after", FAILURES))
        self._drained: set[str] = set()
        self._misfits: dict[str, list[str]] = {}
        """Why nodes do not fit, by id; nothing of those that were looked at and do."""
        self._probed: set[str] = set()
        # Who runs on a node keeps it until that is looked at again; verdicts died with the broker before.
        self._known_before = {node.node_id for node in grantable_nodes()} if restarted else set()
        if restarted:
            self._health.recall(self._journal.of_trust(lambda events: remembered(events, time.time())))
        after = "its death; whoever runs is heard first" if restarted else "the cluster's start"
        reason, facts = f"the broker starts after {after}", {"restarted": restarted}
        self._journal.add([Event("broker_started", reason, facts=facts)])
        self._nodes_read: float | None = None
        self._kinds: list[NodeKind] = []
        self._coming: list[Node] = []
        """The nodes that are there, those too that are still to be looked at."""
        self._unfit: list[Node] = []
        self._alive: dict[str, bool] = {}
        """See `alive`."""
        self._suspects: set[str] = set()
        self._suspects_asked = time.monotonic()
        self._changed = asyncio.Event()
        """Set, and replaced, when grants may be other ones than before."""
        self._changes = 0
        self._refresh(now)

    def info(self) -> dict[str, Any]:
        """The facts given at the start, with the head where it is now."""
        return dict(self._info)

    def request(self, demand: Demand) -> Grant:
        """Register or refresh a demand; returns its grant of this moment."""
        with self._clock.call() as now:
            self._refresh(now)
            grant = self._ledger.request(demand, now)
            self._log()
            return grant

    def preview(self, demand: Demand) -> Grant | None:
        """What a demand would be granted now; it is not noted. None: not known, or its holder has a lease."""
        with self._clock.call() as now:
            self._refresh(now)
            return self._ledger.preview(demand, now)

    async def watch(self, known: Mapping[str, Grant], hold_s: float) -> bool:
        """Wait until one of these holders would be told another grant than it knows; whether that is so.

        Args:
            known: the last grant of each, by holder.
            hold_s: the longest to wait.
        """
        try:
            async with asyncio.timeout(hold_s):
                await asyncio.sleep(WATCH_LEAST_S)
                while not self._is_news(known):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _is_news(self, known: Mapping[str, Grant]) -> bool:
        with self._clock.call() as now:
            for holder, grant in known.items():
                would = self._ledger.would_tell(holder, now)
                if would is not None and (would.nodes, would.coming) != (grant.nodes, grant.coming):
                    return True
        return False

    def suspect(self, node_ids: Collection[str]) -> list[str]:
        """Ask these nodes whether they are there; returns those that are not.

        Ray takes many seconds to declare a node dead. Until it has, or the node answers again, nothing is
        granted there.
        """
        with self._clock.call():
            gone = silent_nodes(node_ids)
            self._suspects = (self._suspects - set(node_ids)) | set(gone)
            self._suspects_asked = time.monotonic()
            self._nodes_read = None
            return gone

    def blame(self, node_id: str, holder: str, against: Against, step: int, elsewhere: bool) -> None:
        """Take in a failure that speaks against a node; see Report.

        The loss of a node that was drained does not: it was announced.
        """
        with self._clock.call():
            rows = {row["NodeID"]: row for row in ray.nodes()}
            if node_id not in rows or (against == "node" and node_id in self._drained):
                return
            gone = not rows[node_id]["Alive"] or node_id in self._suspects
            lost = node_id if against == "node" and gone else None
            name = name_of(rows[node_id], rows.values())
            report = Report(name, holder, against, step, elsewhere, time.time(), lost)
            self._journal.add([self._health.report(report)])
            self._nodes_read = None

    def avoided(self) -> dict[str, dict[str, Any]]:
        """The nodes that are there and avoided, by node id: reason, since, until (UTC), times."""
        with self._clock.call():
            verdicts = self._health.avoided(time.time())
            nodes = grantable_nodes()
            return {node.node_id: verdicts[node.name].as_json() for node in nodes if node.name in verdicts}

    def forgive(self, node_id: str) -> bool:
        """Trust a node again; whether it was avoided."""
        with self._clock.call():
            now = time.time()
            name = next((node.name for node in grantable_nodes() if node.node_id == node_id), None)
            if name is None:
                return False
            known = name in self._health.avoided(now)
            self._journal.add([self._health.forgive(name, now)])
            self._nodes_read = None
            return known

    def judge(self, misfits: Mapping[str, list[str]]) -> None:
        """Take in what a probe says of nodes, by id: why they do not fit; nothing of those that do."""
        with self._clock.call():
            self._probed |= misfits.keys()
            self._misfits |= {node: sentences for node, sentences in misfits.items() if sentences}
            for node in misfits:
                if not misfits[node]:
                    self._misfits.pop(node, None)
            self._nodes_read = None

    def judged(self) -> list[str]:
        """The ids of the nodes that were looked at."""
        return sorted(self._probed)

    def misfits(self) -> dict[str, list[str]]:
        """Why nodes that do not fit do not, by node id."""
        return dict(self._misfits)

    def alive(self) -> dict[str, bool]:
        """The nodes that Ray says are alive, by id: whether they stay, and fit, so that something may be kept
        there for later."""
        with self._clock.call() as now:
            self._refresh(now)
            return dict(self._alive)

    def release(self, holder: str) -> None:
        """End a lease."""
        self._ledger.release(holder)
        self._log()

    def leases(self) -> list[dict[str, Any]]:
        """All leases, by holder."""
        with self._clock.call() as now:
            self._refresh(now)
            return self._ledger.leases(now)

    def explain(self, holder: str) -> dict[str, Any] | None:
        """Why a holder waits or has what it has: see Explanation; None when it has no lease."""
        with self._clock.call() as now:
            self._refresh(now)
            snapshot = self._ledger.snapshot(now)
            return explain(snapshot, holder).as_json() if holder in snapshot.demands else None

    def nodes_of_use(self, kinds: Sequence[NodeKind]) -> dict[str, int] | None:
        """How many nodes of each kind are of use now; None while not everybody was heard yet."""
        self._kinds = list(kinds)
        with self._clock.call() as now:
            self._refresh(now)
            snapshot = self._ledger.snapshot(now)
            if snapshot.closed:
                return None
            return nodes_of_use(kinds, self._coming, self._unfit, snapshot)

    def kinds(self) -> list[NodeKind]:
        """The nodes that can be had, as `nodes_of_use` was told of them; none where all nodes are there."""
        return self._kinds

    def foreign(self) -> dict[str, dict[str, float]]:
        """What strangers use, by node id."""
        with self._clock.call() as now:
            self._refresh(now)
            return self._strangers

    def events(self, after: tuple[int, int] | None, most: int) -> list[dict[str, Any]]:
        """The events after a place (epoch, seq), the oldest first; with None, the newest."""
        with self._clock.call() as now:
            self._refresh(now)
            return self._journal.after(after, most)

    def _refresh(self, now: float) -> None:
        # What is known of the nodes grows old whether the broker listens or not.
        read_at = time.monotonic()
        if self._suspects and read_at - self._suspects_asked >= SUSPECTS_EVERY_S:
            self._suspects = set(silent_nodes(self._suspects))
            self._suspects_asked = read_at
        if self._nodes_read is None or read_at - self._nodes_read >= NODES_EVERY_S:
            nodes = grantable_nodes()
            self._suspects &= {node.node_id for node in nodes}
            # Who runs on a node that is about to go leaves it in good order: nothing is granted there.
            draining = draining_nodes()
            self._drained |= draining
            absent = self._suspects | draining | self._misfits.keys()
            unproved: set[str] = set()
            if self._info.get("probed"):
                unproved = {node.node_id for node in nodes} - self._probed
                absent |= unproved - self._known_before
            self._journal.add(self._health.changes(time.time()))
            avoided = self._health.avoided(time.time())
            present = [
                replace(node, avoided=node.name in avoided or node.node_id in unproved)
                for node in nodes
                if node.node_id not in absent
            ]
            leaving = draining | self._misfits.keys()
            self._alive = {node.node_id: node.node_id not in leaving for node in nodes}
            going = self._suspects | draining
            self._unfit = [node for node in nodes if node.node_id in self._misfits.keys() - going]
            self._coming = [
                replace(node, avoided=node.name in avoided)
                for node in nodes
                if node.node_id not in going | self._misfits.keys()
            ]
            self._strangers = self._foreign.update(used_of(present), self._ledger.occupied(), now)
            self._ledger.update_nodes(present, self._strangers)
            self._nodes_read = read_at
        self._ledger.expire(now)
        self._log()

    def _log(self) -> None:
        events = self._ledger.take_events()
        if events:
            self._journal.add(events)
        if self._changes != self._ledger.changes:
            self._changes = self._ledger.changes
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()


def used_of(nodes: Collection[Node]) -> dict[str, dict[str, float]]:
    """What of each node is in use, by its id; nodes of which Ray does not tell are left out."""
    free = available_resources_by_node()
    return {
        node.node_id: {
            # Ray leaves out what is used up.
            name: total - free[node.node_id].get(name, 0.0)
            for name, total in countable(node.resources).items()
        }
        for node in nodes
        if node.node_id in free
    }


def silent_nodes(node_ids: Collection[str]) -> list[str]:
    """Those of these nodes that Ray says are dead, that it does not know, or whose raylet does not answer."""
    addresses = {
        row["NodeID"]: f"{row['NodeManagerAddress']}:{row['NodeManagerPort']}"
        for row in ray.nodes()
        if row["Alive"] and row["NodeID"] in node_ids
    }
    dead = [node for node in node_ids if node not in addresses]
    return dead + silent(addresses, ANSWER_TIMEOUT_S)


def grantable_nodes() -> list[Node]:
    """The nodes that Ray says are alive, with all they have; needs a connection to the cluster."""
    rows = sorted(ray.nodes(), key=lambda row: row["NodeID"])
    return [
        Node(
            node_id=row["NodeID"],
            # Ray adds resources of its own (node:<ip>, memory, object_store_memory); no unit asks for
            # the former, and the latter change with the machine.
            resources={key: value for key, value in row["Resources"].items() if not key.startswith("node:")},
            name=name_of(row, rows),
            accelerator=accelerator_of(row.get("Labels", {})),
            kind=row.get("Labels", {}).get(KIND_LABEL),
        )
        for row in rows
        if row["Alive"]
    ]


def start_broker(info: Mapping[str, Any]) -> None:
    """Start the cluster's broker on the head node and wait until it answers; one that runs is left alone.

    Needs a connection to the cluster (`ray.init`).

    Raises:
        ShoalError: the broker did not start in time.
    """
    start_on_head(Broker, BROKER_NAME, NAMESPACE, dict(info), what="the broker", first_call="info")
