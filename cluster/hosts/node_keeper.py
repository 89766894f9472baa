"""Sees to every node that joins while the cluster is up: it gets an agent, and the broker is told whether it
fits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.head_actor import begin_on_head
from cluster.errors import ShoalError
from cluster.hosts.probe import ProbedNode, probe
from cluster.node.node_agent import start_node_agents
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
        probed: whether nodes have to be looked at.
    """

    def __init__(self, storage: str, probed: bool) -> None:
        self._storage = storage
        self._probed = probed
        threading.Thread(target=self._run, daemon=True).start()

    def hears(self) -> None:
        """Answer."""

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                start_node_agents(living_node_ids())
                if self._probed:
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


def living_node_ids() -> list[str]:
    """Ids of the nodes that are alive. Also of those without devices: drivers of jobs have processes too."""
    return [row["NodeID"] for row in ray.nodes() if row["Alive"]]


def _gpus(row: dict[str, Any]) -> float:
    return float(row["Resources"].get("GPU", 0.0))


def begin_node_keeper(storage: str, *, probed: bool) -> Callable[[], Any]:
    """Have it started on the head; what is returned waits until it answers. One that runs is left alone.

    Raises:
        ShoalError: from what is returned, it did not start in time.
    """
    return begin_on_head(
        NodeKeeper, NAME, NAMESPACE, storage, probed, what="what looks at new nodes", first_call="hears"
    )
