"""What is private in Ray and the controller needs; a test fails when Ray changes it."""

from __future__ import annotations


def living_replicas() -> frozenset[str]:
    """The ids of the replicas of all applications that Ray does not know to be dead."""
    from ray.util import list_named_actors

    named = (replica_named(each["name"]) for each in list_named_actors(all_namespaces=True))
    return frozenset(each[1] for each in named if each is not None)


def replica_named(actor: str) -> tuple[str, str] | None:
    """(Serve application, id) of the replica whose actor has this name; None where it is no replica's."""
    prefix, _, named = actor.partition("::")
    application, _, rest = named.partition("#")
    _, _, replica = rest.partition("#")
    return (application, replica) if prefix == "SERVE_REPLICA" and replica else None
