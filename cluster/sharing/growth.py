"""How many nodes of each kind are of use, where more can be had than there are: pure logic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config.sections.cluster import NodeConfig
from cluster.sharing.allocate import allocate
from cluster.sharing.demand import Node
from cluster.sharing.ledger import Snapshot

_LAST = "\U0010ffff"
"""Begins the names of nodes that are not there: among equals the allocation takes the lesser name first."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes that are alike.

    Attributes:
        most: how many of them can be had, with those that are there.
        resources: of each, in Ray's names.
        accelerator: kind of its accelerators, as Node has it.
    """

    name: str
    most: int
    resources: Mapping[str, float]
    accelerator: str | None = None


def config_of(kind: NodeKind) -> NodeConfig:
    """A kind as the config has it, with all the nodes that can be had."""
    # More of them may be had than the config may count.
    return NodeConfig.model_construct(
        name=kind.name,
        count=kind.most,
        cpus=int(kind.resources.get("CPU", 0)),
        gpus=int(kind.resources.get("GPU", 0)),
        accelerator=kind.accelerator,
    )


def nodes_of_use(
    kinds: Sequence[NodeKind], nodes: Sequence[Node], unfit: Sequence[Node], snapshot: Snapshot
) -> dict[str, int]:
    """So many nodes of each kind hold what runs, and what would be granted if they were there.

    The allocation itself is asked, as if all nodes stood there that can be had: it meets minimums before
    wants, and gives nobody what no number of nodes would make room for.

    Args:
        nodes: that are there, or about to be used, with all they have.
        unfit: nodes that are there and on which nothing is granted. They are of no use; but whoever makes
            nodes counts them, so they are added as long as a further node is of use.
    """
    there = Counter(node.kind for node in (*nodes, *unfit))
    further = [
        Node(f"{_LAST}{kind.name}/{number}", kind.resources, f"{_LAST}{kind.name}", kind.accelerator)
        for kind in kinds
        for number in range(kind.most - there[kind.name])
    ]
    kind_of = {node.node_id: node.kind for node in nodes}
    kind_of |= {node.node_id: node.name.removeprefix(_LAST) for node in further}
    # What strangers use is in `nodes`, and not in those of the snapshot.
    granted_of = {node.node_id: node for node in snapshot.nodes}
    grants = allocate(
        [*(granted_of.get(node.node_id, node) for node in nodes), *further],
        list(snapshot.demands.values()),
        snapshot.priority,
        since=snapshot.since,
        overdue=snapshot.overdue,
    )
    used = {node for grant in grants.values() for node in (*grant.nodes, *grant.coming)}
    used |= {node for units in snapshot.leaving.values() for node in units} | snapshot.foreign.keys()
    of_use = Counter(kind_of[node] for node in used & kind_of.keys())
    if any(node.node_id in used for node in further):
        of_use += Counter(node.kind for node in unfit)
        of_use += Counter(node.kind for node in nodes if node.avoided and node.node_id not in used)
    return {kind.name: of_use[kind.name] for kind in kinds}
