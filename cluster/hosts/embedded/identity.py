"""Who an embedded cluster is, written down before its first process starts: what a clean-up needs.

A state directory with an identity and without a record is a start that did not end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.state.record import SERVE_PORT, made_of, read_document, write_document
from cluster.state.state_directory import state_directory, state_root

IDENTITY_FILE = "identity.json"


@dataclass(frozen=True)
class Identity:
    """Who a cluster is, from before its first process starts."""

    name: str
    cluster_id: str
    """Value of SHOAL_CLUSTER_ID in the environment of every process of the cluster."""
    config_path: str
    subnet: str
    """First three bytes of its addresses: `127.A.B`."""
    dashboard_host: str
    dashboard_port: int
    gateway_host: str
    gateway_port: int
    cluster: Mapping[str, Any] = field(default_factory=dict)
    """The config's cluster section as it was started."""
    serve_host: str = ""
    serve_port: int = SERVE_PORT
    api_host: str = ""
    api_port: int = 0
    machine: str = ""
    """What the machine calls itself that it was started on; empty where an older version wrote it."""


def read_identity(name: str) -> Identity | None:
    """The identity of a cluster that was started or half started and not taken down."""
    path = state_directory(name) / IDENTITY_FILE
    found = read_document(path)
    return None if found is None else made_of(Identity, found, path)


def write_identity(identity: Identity) -> None:
    """Say that a cluster is about to be started."""
    write_document(state_directory(identity.name) / IDENTITY_FILE, asdict(identity))


def other_identities(name: str) -> list[Identity]:
    """The identities of this user's other clusters."""
    identities = []
    for path in sorted(state_root().glob(f"*/{IDENTITY_FILE}")):
        found = read_document(path)
        if found is not None and found.get("name") != name:
            identities.append(made_of(Identity, found, path))
    return identities
