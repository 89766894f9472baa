"""Which replicas have an engine: only they are given requests, of all that Serve has of an application.

Serve makes the routers, and hands nothing in: so this is the process's, as `decisions` are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_active: Mapping[str, frozenset[str]] = {}
"""The ids of the replicas, by Serve application. Replaced as a whole: routers read it in another thread."""


def tell_active(replicas: Mapping[str, Collection[str]]) -> None:
    """From now on these replicas have an engine, by Serve application."""
    global _active
    _active = {application: frozenset(each) for application, each in replicas.items()}


def is_active(application: str, replica: str) -> bool:
    """Whether a replica may be given a request; of an application that nobody has told of, each may."""
    active = _active.get(application)
    return active is None or replica in active
