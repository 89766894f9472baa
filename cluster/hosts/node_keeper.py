"""Looks at every node that joins while the cluster is up, and tells the broker whether it fits."""

from __future__ import annotations

import logging
import threading
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.head_actor import start_on_head
from cluster.errors import ShoalError
from cluster.hosts.probe import ProbedNode, probe
from cluster.ray_private import HEAD_RESOURCE
from cluster.sharing.client import BrokerClient
from cluster.state.nodes import node_names

NAME = "shoal-nodes"
LOOK_EVERY_S = 1.0

logger = logging.getLogger(__name__)


class NodeKeeper:
    """The actor; it has a thread that looks.

    Args:
        storage: the cluster's.
    """

    def __init__(self, storage: str) -> None:
        self._storage = storage
        threading.Thread(target=self._run, daemon=True).start()

    def hears(self) -> None:
        """Answer."""

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                look(self._storage)
            except (ShoalError, ray.exceptions.RayError) as error:
                logger.warning("the nodes could not be looked at: %s", error)
            pause.wait(LOOK_EVERY_S)


def look(storage: str) -> dict[str, list[str]]:
    """Look at the nodes that the broker does not know yet, and tell it; what was found of them."""
    broker = BrokerClient()
    known = set(broker.judged())
    nodes, head = living_nodes()
    new = [node for node in nodes if node.node_id not in known]
    if not new or head is None:
        return {}
    # The head is what the others are held to; it was looked at when the cluster came up.
    with_head = [node for node in nodes if node.node_id == head and node not in new]
    found = probe([*with_head, *new], head, storage).misfits
    told = {node.node_id: found[node.node_id] for node in new}
    broker.judge(told)
    return told


def living_nodes() -> tuple[list[ProbedNode], str | None]:
    """The nodes that are alive, and the id of the head."""
    names = node_names()
    rows = [row for row in ray.nodes() if row["Alive"]]
    nodes = [
        ProbedNode(row["NodeID"], names[row["NodeID"]], row["NodeManagerAddress"], _gpus(row)) for row in rows
    ]
    head = next((row["NodeID"] for row in rows if HEAD_RESOURCE in row["Resources"]), None)
    return nodes, head


def _gpus(row: dict[str, Any]) -> float:
    return float(row["Resources"].get("GPU", 0.0))


def start_node_keeper(storage: str) -> None:
    """Start it on the head, and wait until it answers; one that runs is left alone.

    Raises:
        ShoalError: it did not start in time.
    """
    start_on_head(NodeKeeper, NAME, NAMESPACE, storage, what="what looks at new nodes", first_call="hears")
