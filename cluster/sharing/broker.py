"""The broker: the one actor of a cluster that keeps the leases."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import ray

from cluster.head_actor import start_on_head
from cluster.health import silent
from cluster.nodes import ACCELERATOR_LABEL, NODE_LABEL
from cluster.sharing.demand import Demand, Grant, Node
from cluster.sharing.ledger import Ledger

BROKER_NAME = "shoal-broker"
NAMESPACE = "shoal"
NODES_EVERY_S = 1.0
"""The list of nodes is read at most this often."""
SUSPECTS_EVERY_S = 5.0
"""How often a node that did not answer is asked again."""
ANSWER_TIMEOUT_S = 2.0
GRACE_S = 3.0
"""Seconds after a restart in which nothing new is granted, so that those who run are heard first."""
RAY_ACCELERATOR_LABEL = "ray.io/accelerator-type"
"""Ray's own, on nodes that it found an accelerator on; ours is the config's word."""


class Broker:
    """The actor: a ledger, a clock, and Ray's list of nodes.

    Args:
        info: facts about the cluster that whoever runs inside it asks for (`name`, `storage`,
            `gateway_host`, `gateway_port`, `dashboard_url`); `priority` decides whose wants come first.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._info = dict(info)
        now = time.monotonic()
        # A first start knows that there is nobody; a restart does not know who runs.
        with warnings.catch_warnings():
            # Inside, Ray reads a property of its own that it has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._ledger = Ledger(
            self._info.get("priority", "serving"), closed_until=now + GRACE_S if restarted else None
        )
        self._nodes_read: float | None = None
        self._suspects: set[str] = set()
        self._suspects_asked = now
        self._refresh(now)

    def info(self) -> dict[str, Any]:
        """The facts given at the start."""
        return dict(self._info)

    def request(self, demand: Demand) -> Grant:
        """Register or refresh a demand; returns its grant of this moment."""
        now = time.monotonic()
        self._refresh(now)
        return self._ledger.request(demand, now)

    def suspect(self, node_ids: Collection[str]) -> list[str]:
        """Ask these nodes whether they are there; returns those that are not.

        Ray takes many seconds to declare a node dead. Until it has, or the node answers again, nothing is
        granted there.
        """
        gone = silent_nodes(node_ids)
        self._suspects = (self._suspects - set(node_ids)) | set(gone)
        self._suspects_asked = time.monotonic()
        self._nodes_read = None
        return gone

    def release(self, holder: str) -> None:
        """End a lease."""
        self._ledger.release(holder)

    def leases(self) -> list[dict[str, Any]]:
        """All leases, by holder."""
        now = time.monotonic()
        self._refresh(now)
        return self._ledger.leases(now)

    def _refresh(self, now: float) -> None:
        if self._suspects and now - self._suspects_asked >= SUSPECTS_EVERY_S:
            self._suspects = set(silent_nodes(self._suspects))
            self._suspects_asked = now
        if self._nodes_read is None or now - self._nodes_read >= NODES_EVERY_S:
            nodes = alive_nodes()
            self._suspects &= {node.node_id for node in nodes}
            self._ledger.update_nodes([node for node in nodes if node.node_id not in self._suspects])
            self._nodes_read = now


def silent_nodes(node_ids: Collection[str]) -> list[str]:
    """Those of these nodes that Ray says are dead, that it does not know, or whose raylet does not answer."""
    addresses = {
        row["NodeID"]: f"{row['NodeManagerAddress']}:{row['NodeManagerPort']}"
        for row in ray.nodes()
        if row["Alive"] and row["NodeID"] in node_ids
    }
    dead = [node for node in node_ids if node not in addresses]
    return dead + silent(addresses, ANSWER_TIMEOUT_S)


def alive_nodes() -> list[Node]:
    """The nodes that Ray says are alive, with all they have; needs a connection to the cluster."""
    return [
        Node(
            node_id=row["NodeID"],
            # Ray adds resources of its own (node:<ip>, memory, object_store_memory); no unit asks for
            # the former, and the latter change with the machine.
            resources={key: value for key, value in row["Resources"].items() if not key.startswith("node:")},
            name=row.get("Labels", {}).get(NODE_LABEL) or row.get("NodeName") or row["NodeManagerAddress"],
            accelerator=accelerator_of(row.get("Labels", {})),
        )
        for row in sorted(ray.nodes(), key=lambda row: row["NodeID"])
        if row["Alive"]
    ]


def accelerator_of(labels: Mapping[str, str]) -> str | None:
    """The kind of a node's accelerators, by its labels."""
    return labels.get(ACCELERATOR_LABEL) or labels.get(RAY_ACCELERATOR_LABEL) or None


def start_broker(info: Mapping[str, Any]) -> None:
    """Start the cluster's broker on the head node and wait until it answers; one that runs is left alone.

    Needs a connection to the cluster (`ray.init`).

    Raises:
        ShoalError: the broker did not start in time.
    """
    start_on_head(Broker, BROKER_NAME, NAMESPACE, dict(info), what="the broker", first_call="info")
