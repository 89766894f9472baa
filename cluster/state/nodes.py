"""The nodes of the cluster as they are now: who is alive, what each has, and what of it is in use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cluster.config.sections.cluster import NodeConfig
from cluster.ray_private import HEAD_RESOURCE, available_resources_by_node

NODE_LABEL = "shoal.io/node"
ACCELERATOR_LABEL = "shoal.io/accelerator"
KIND_LABEL = "shoal.io/kind"
"""The kind of a node in the config, where somebody else makes nodes of it."""
RAY_ACCELERATOR_LABEL = "ray.io/accelerator-type"
"""Ray's own, on nodes that it found an accelerator on; ours is the config's word."""


@dataclass(frozen=True)
class NodeState:
    """One node; resources in Ray's names and units (CPU and GPU in pieces, memory in bytes)."""

    name: str
    node_id: str
    alive: bool
    head: bool
    resources: dict[str, float]
    used: dict[str, float]
    accelerator: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def node_states() -> list[NodeState]:
    """Every node of the cluster this process is connected to; the head first, then by name.

    Dead ones too, but for those whose name another has by now: a host that was started again.
    """
    import ray

    free = available_resources_by_node()
    states = []
    rows = ray.nodes()
    for row in rows:
        # Ray gives every node resources that only name it; they say nothing to a reader.
        has = {key: value for key, value in row["Resources"].items() if not key.startswith("node:")}
        left = free.get(row["NodeID"], {})
        states.append(
            NodeState(
                name=name_of(row, rows),
                node_id=row["NodeID"],
                alive=row["Alive"],
                head=HEAD_RESOURCE in row["Resources"],
                resources=has,
                used={key: round(total - left.get(key, 0.0), 4) for key, total in has.items()},
                accelerator=accelerator_of(row.get("Labels", {})),
            )
        )
    alive = {state.name for state in states if state.alive}
    states = [state for state in states if state.alive or state.name not in alive]
    return sorted(states, key=lambda state: (not state.head, state.name))


def states_of(rows: Iterable[Mapping[str, Any]]) -> list[NodeState]:
    """Nodes as `as_json` has told them, perhaps with more."""
    known = [one.name for one in fields(NodeState)]
    return [NodeState(**{name: row[name] for name in known}) for row in rows]


def kinds_of(states: Iterable[NodeState]) -> tuple[NodeConfig, ...]:
    """Those that are alive, as the config would name them."""
    return tuple(
        # A host may be called what no config could name.
        NodeConfig.model_construct(
            name=state.name,
            count=1,
            cpus=int(state.resources.get("CPU", 0)),
            gpus=int(state.resources.get("GPU", 0)),
            accelerator=state.accelerator,
        )
        for state in states
        if state.alive
    )


def accelerator_of(labels: Mapping[str, str]) -> str | None:
    """The kind of a node's accelerators, by its labels."""
    return labels.get(ACCELERATOR_LABEL) or labels.get(RAY_ACCELERATOR_LABEL) or None


def alive_nodes() -> set[str]:
    """Ids of the nodes that Ray says are alive."""
    import ray

    return {row["NodeID"] for row in ray.nodes() if row["Alive"]}


def node_names() -> dict[str, str]:
    """Names of all nodes by node id, of dead ones too."""
    import ray

    rows = ray.nodes()
    return {row["NodeID"]: name_of(row, rows) for row in rows}


def node_name(node_id: str) -> str:
    """What to call the node of this id; its id where Ray does not know it."""
    return node_names().get(node_id, node_id)


def name_of(row: Mapping[str, Any], rows: Collection[Mapping[str, Any]] = ()) -> str:
    """What to call a node of Ray's list: as whoever started it said, else as its host calls itself.

    Args:
        rows: all of the list; where several nodes of it that are alive stand on one host, they are called by
            their addresses.
    """
    given = row.get("Labels", {}).get(NODE_LABEL) or row.get("NodeName")
    if given and given != row["NodeManagerAddress"]:
        return str(given)
    host = row.get("NodeManagerHostname")
    beside = sum(each.get("NodeManagerHostname") == host and each["Alive"] for each in rows)
    return str(host) if host and beside < 2 else str(row["NodeManagerAddress"])
