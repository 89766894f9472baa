"""What is known here about a cluster that is up: a small JSON file in its state directory.

It is written when everything is up, and is what a connection needs.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from cluster.errors import ShoalError
from cluster.loopback import own_address
from cluster.state.state_directory import require_private, state_directory, write_private

Kind = TypeVar("Kind")

RECORD_FILE = "record.json"
TOKEN_FILE = "token"
SERVE_PORT = 8000
"""Where Ray Serve's proxy listens unless who starts Serve says otherwise: its tools do not ask for a port."""


@dataclass(frozen=True)
class NodeRecord:
    """One node as it was started."""

    name: str
    ip: str
    node_id: str
    """Ray's id of the node (hexadecimal)."""
    raylet_address: str
    """HOST:PORT of its raylet, which answers gRPC health checks."""


@dataclass(frozen=True)
class ClusterRecord:
    """A cluster that was up, with all that is needed to connect to it."""

    name: str
    cluster_id: str
    config_path: str
    base_dir: str
    """Directory of the config file, from which its relative paths count."""
    storage: str
    """Absolute path or URI."""
    head_ip: str
    gcs_address: str
    """HOST:PORT of Ray's control store: what Ray calls the cluster's address."""
    dashboard_url: str
    gateway_host: str
    gateway_port: int
    token_path: str | None
    """The file with Ray's token; None where the cluster asks for none."""
    tls: Mapping[str, str] = field(default_factory=dict)
    """Ray's variables for its own channels, as health.tls_variables names them."""
    nodes: tuple[NodeRecord, ...] = ()
    """Those that were started with the cluster, the head first; none where somebody else starts them."""
    serve_host: str | None = None
    """Where Ray Serve's own proxy listens; None for where Ray has it."""
    serve_port: int = SERVE_PORT
    api_host: str = ""
    api_port: int = 0
    """Where the control API listens; 0 where an older version brought the cluster up, which had none."""
    api_certificate: str | None = None
    """The file with its certificate; None where it is plain HTTP."""
    gateway_certificate: str | None = None
    """The file with that of the gateways' front; None where it is plain HTTP."""
    provider: str = "embedded"
    python: str = sys.executable
    """The interpreter on the head."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of everything of ours that runs there, where the nodes' own environment lacks them."""

    @property
    def is_here(self) -> bool:
        """Whether this machine is one of its nodes: it sees their files, and can join them."""
        return self.provider in ("embedded", "existing")

    @property
    def serve_url(self) -> str:
        """Ray Serve's own proxy, for applications that are not Shoal's."""
        return http_url(self.serve_host or own_address(), self.serve_port, self.head_ip)

    @property
    def api_url(self) -> str:
        """The control API."""
        return http_url(self.api_host, self.api_port, self.head_ip, tls=self.api_certificate is not None)

    @property
    def gateway_url(self) -> str:
        """The OpenAI base URL."""
        tls = self.gateway_certificate is not None
        return f"{http_url(self.gateway_host, self.gateway_port, self.head_ip, tls=tls)}/v1"


def http_url(host: str, port: int, instead_of_all: str, *, tls: bool = False) -> str:
    """The URL under which a server that binds `host` is reached; all interfaces have no URL of their own."""
    if host in ("0.0.0.0", "::", ""):
        host = instead_of_all
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def read_record(name: str) -> ClusterRecord | None:
    """The record of a cluster that was started and not taken down; it may have died since.

    Raises:
        ShoalError: the state directory is not ours alone, or the record cannot be read.
    """
    path = state_directory(name) / RECORD_FILE
    found = read_document(path)
    if found is None:
        return None
    nodes = tuple(made_of(NodeRecord, node, path) for node in found.get("nodes", ()))
    return made_of(ClusterRecord, {**found, "nodes": nodes}, path)


def new_token() -> str:
    """A token for Ray."""
    return secrets.token_hex(32)


def token_of(name: str) -> str:
    """Ray's token of a cluster, which is made here when it is asked for first."""
    path = state_directory(name) / TOKEN_FILE
    if not path.exists():
        write_private(path, new_token())
    return path.read_text(encoding="utf-8")


def write_record(record: ClusterRecord) -> None:
    """Say that the cluster is up."""
    write_document(state_directory(record.name) / RECORD_FILE, asdict(record))


def made_of(kind: type[Kind], found: Mapping[str, Any], path: Path) -> Kind:
    """What another version of Shoal may have written: fields that are not known here are passed over.

    Raises:
        ShoalError: it lacks one that is needed.
    """
    known = {one.name: found[one.name] for one in fields(kind) if one.name in found}  # type: ignore[arg-type]
    try:
        return kind(**known)
    except TypeError as error:
        raise ShoalError(
            f"{path} was written by another version of Shoal: take that cluster down with the version that"
            f" started it, or remove the directory {path.parent} once no process of it runs"
        ) from error


def read_document(path: Path) -> dict[str, Any] | None:
    if not path.parent.is_dir():
        return None
    require_private(path.parent.parent)
    require_private(path.parent)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ShoalError(
            f"{path} is damaged ({error}); remove the directory {path.parent} once no process of it runs"
        ) from error
    return dict(found)


def write_document(path: Path, content: Mapping[str, Any]) -> None:
    write_private(path, json.dumps(content, indent=2) + "\n")
