"""Which nodes have a gateway."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from cluster.state.nodes import NodeState


def gateway_nodes(
    count: int | Literal["all"],
    nodes: Sequence[NodeState],
    unfit: Collection[str] = (),
    now: Collection[str] = (),
) -> tuple[str, ...]:
    """The ids of the nodes that are to have one beside the head, which has one always.

    Args:
        count: gateways of the cluster.
        unfit: ids of nodes that do not fit, or are about to go.
        now: ids of those that have one; they keep it before others get one.
    """
    fit = [node for node in nodes if node.alive and not node.head and node.node_id not in unfit]
    fit.sort(key=lambda node: (node.node_id not in now, node.name))
    return tuple(node.node_id for node in (fit if count == "all" else fit[: count - 1]))
