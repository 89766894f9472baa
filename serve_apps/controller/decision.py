"""What is seen of an app's revisions, and what is decided from it; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from serve_apps.controller.record import AppRecord


@dataclass(frozen=True)
class Seen:
    """A revision, as Serve, its replicas, the broker and the gateways tell of it now."""

    ready: int = 0
    held: int = 0
    """Its replicas that have devices, those that start and those that end included."""
    granted: int = 0
    """Replicas that the lease it is counted in allows."""
    gone: bool = False
    """Serve does not have it any more."""
    failure: str | None = None
    """Why it cannot be started."""
    probe: str | None = None
    """What was wrong with its answers to the probes: empty if nothing was; None before they came."""
    drained: bool = False
    """Every gateway knows that it gets no requests, and has none of it left."""
    taken: bool = False
    """Every gateway knows that it gets requests."""
    requests: int = 0
    errors: int = 0
    """How many of its requests failed."""
    prepared: int = 0
    """Replicas that could load its weights (in_place)."""
    loaded: int = 0
    """Replicas that run its weights."""
    refusal: str | None = None
    """Why a replica cannot load its weights (in_place)."""
    shortage: str = ""
    """Why its devices are not granted, as far as that is known."""


@dataclass(frozen=True)
class Decision:
    """What is to be done now; repeating it does no harm."""

    record: AppRecord
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Replicas by revision; one that is not named is left as it is."""
    traffic: frozenset[int] = frozenset()
    """The revisions that get requests; while there is none, requests wait."""
    standby: frozenset[int] = frozenset()
    """Revisions that get what those with requests have failed to answer."""
    asks: Mapping[str, int] = field(default_factory=dict)
    """Replicas that each lease should allow."""
    delete: frozenset[int] = frozenset()
    probe: int | None = None
    """A revision whose probes are due."""
    order: Literal["prepare", "load"] | None = None
    """What all replicas are to do with the weights of `ordered` (in_place)."""
    ordered: int | None = None
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()
