"""The hosts of a cluster, as they were when it was started: what later commands need to reach them.

Written down before the first node starts, in the cluster's state directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.config.sections.cluster import ClusterConfig
from cluster.errors import RequestError, ShoalError
from cluster.hosts.ssh.ssh_connection import (
    Connection,
    Destination,
    HostError,
    leads_through,
    sockets_directory,
)
from cluster.loopback import own_address
from cluster.state.record import made_of, read_document, write_document
from cluster.state.state_directory import state_directory

FLEET_FILE = "hosts.json"


@dataclass(frozen=True)
class FleetHost:
    """One host.

    Attributes:
        python: the interpreter there that has Shoal.
        address: of the host, in the network of the nodes; empty before anybody has looked.
    """

    destination: Destination
    python: str
    cpus: int | None = None
    gpus: int | None = None
    accelerator: str | None = None
    address: str = ""

    @property
    def node(self) -> str:
        return self.destination.node


@dataclass(frozen=True)
class Fleet:
    """All of them, the head first.

    Attributes:
        mark: in the environment of all that runs on them for this cluster.
        directory: of the head's node, on the head; empty before it runs.
        state: on the head, what the commands there know of the cluster.
    """

    name: str
    mark: str
    config_path: str
    hosts: tuple[FleetHost, ...]
    cluster: Mapping[str, Any] = field(default_factory=dict)
    """The config's cluster section as it was started."""
    directory: str = ""
    state: str = ""
    gcs_address: str = ""
    servers: Mapping[str, int] = field(default_factory=dict)
    """The ports of the head's servers."""
    api: str = ""
    """HOST:PORT of the control API, on the head."""
    forwards: Mapping[str, str] = field(default_factory=dict)
    """Ports of this machine's loopback, and HOST:PORT on the head where they come out."""

    @property
    def head(self) -> FleetHost:
        return self.hosts[0]

    def host(self, node: str) -> FleetHost:
        """That of a node.

        Raises:
            RequestError: there is no such node.
        """
        for each in self.hosts:
            if each.node == node:
                return each
        names = ", ".join(each.node for each in self.hosts)
        raise RequestError(f"cluster {self.name} has no node {node!r}; it has: {names}")

    def head_connection(self) -> Connection:
        """The head's, which stays from `up` to `down`."""
        return Connection(self.head.destination, keep=True)

    def renamed(self) -> dict[str, str]:
        """How URLs of servers on the head begin that are reached from here at other ports."""
        return {
            f"http://{to}": f"http://{own_address()}:{port}"
            for port, to in self.forwards.items()
            if to.rpartition(":")[2] != port
        }

    def api_socket(self) -> Path:
        """The socket of this machine that comes out at the control API."""
        return sockets_directory() / f"{self.mark[:16]}.api"

    def open_way(self) -> Path:
        """Have a connection to the head, with all ports that go over it; the socket of the control API.

        Raises:
            HostError: the head does not answer, or does not let us in.
        """
        socket, connection = self.api_socket(), self.head_connection()
        if leads_through(socket):
            return socket
        connection.open()
        for port, to in self.forwards.items():
            connection.forward(None, int(port), to)
        if not connection.forward(socket, 0, self.api):
            raise HostError(
                f"{self.head.destination.words} lets no port through (AllowTcpForwarding of its sshd)"
            )
        return socket


def hosts_of(cluster: ClusterConfig) -> tuple[FleetHost, ...]:
    """The hosts that a config names."""
    ssh = cluster.ssh
    found = []
    for kind in cluster.nodes:
        said = kind.model_fields_set
        for node, host in zip(kind.names(), kind.host_names(), strict=True):
            destination = Destination(
                node, host, kind.user or ssh.user, kind.port, ssh.identity_file, dict(ssh.options)
            )
            cpus = kind.cpus if "cpus" in said else None
            gpus = kind.gpus if "gpus" in said else None
            found.append(FleetHost(destination, ssh.python, cpus, gpus, kind.accelerator))
    return tuple(found)


def read_fleet(name: str) -> Fleet | None:
    """The hosts of a cluster that was started or half started and not taken down."""
    path = state_directory(name) / FLEET_FILE
    found = read_document(path)
    if found is None:
        return None
    hosts = tuple(
        made_of(FleetHost, {**host, "destination": made_of(Destination, host["destination"], path)}, path)
        for host in found.get("hosts", ())
    )
    return made_of(Fleet, {**found, "hosts": hosts}, path)


def require_fleet(name: str) -> Fleet:
    """The same.

    Raises:
        ShoalError: there is none.
    """
    fleet = read_fleet(name)
    if fleet is None:
        raise ShoalError(f"cluster {name} was not brought up from here on hosts of its own (`provider: ssh`)")
    return fleet


def write_fleet(fleet: Fleet) -> None:
    """Keep them."""
    write_document(state_directory(fleet.name) / FLEET_FILE, asdict(fleet))
