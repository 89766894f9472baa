"""The one private function of Ray that the cluster package needs.

Ray tells what each node has (`ray.nodes()`) and what is free in the whole cluster
(`ray.available_resources()`), but has no public call for what is free on each node. A test compares this
with the public total, and fails when Ray changes it.
"""

from __future__ import annotations


def available_resources_by_node() -> dict[str, dict[str, float]]:
    """What is free now on each live node, by node id; needs a connection to the cluster."""
    from ray._private.state import available_resources_per_node

    return {node_id: dict(free) for node_id, free in available_resources_per_node().items()}
