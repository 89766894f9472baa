"""What is private in Ray and the controller needs; a test fails when Ray changes it."""

from __future__ import annotations

_OF_REPLICA = "SERVE_REPLICA::"
"""How Serve begins the names of its replicas, which their placement groups have too."""


def replica_nodes() -> dict[str, tuple[str, ...]]:
    """By application, the node ids of its replicas, those that start and those that drain included.

    A replica holds its devices as a placement group, to which Serve gives the replica's full id as name.
    """
    from ray.util import placement_group_table

    nodes: dict[str, list[str]] = {}
    for group in placement_group_table().values():
        kind, _, rest = str(group.get("name", "")).partition(_OF_REPLICA)
        application, found, _ = rest.partition("#")
        if not kind and found and group.get("state") == "CREATED":
            nodes.setdefault(application, []).append(next(iter(group["bundles_to_node_id"].values())))
    return {application: tuple(sorted(each)) for application, each in nodes.items()}


def replica_named(actor: str) -> tuple[str, str] | None:
    """(Serve application, id) of the replica whose actor has this name; None where it is no replica's."""
    prefix, _, named = actor.partition("::")
    application, _, rest = named.partition("#")
    _, _, replica = rest.partition("#")
    return (application, replica) if prefix == "SERVE_REPLICA" and replica else None
