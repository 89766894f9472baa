"""Ports of this host for the servers of a cluster's head, which no other cluster of Shoal's gets.

Between the choice of a port and the server that listens there seconds pass, in which another cluster's
head on this host may choose the same. So what is chosen is held by a name in the kernel's abstract
namespace: every user of the host sees it, nobody has to write a file, and it goes with the process that
holds it.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.config.sections.cluster import EndpointConfig
from cluster.hosts.endpoints import (
    API_PORT,
    DASHBOARD_PORT,
    EVERY_HOST,
    GATEWAY_PORT,
    Endpoint,
    choose_endpoint,
    free_port,
)
from cluster.loopback import own_address
from cluster.state.record import SERVE_PORT

GCS_PORT = 6379
"""Ray's usual port."""
EVERYWHERE = "0.0.0.0"
_NAME = "shoal-port"
_SOCKETS = Path("/proc/net/unix")
USUAL = {
    "serve_proxy": SERVE_PORT,
    "gateway": GATEWAY_PORT,
    "api": API_PORT,
    "dashboard": DASHBOARD_PORT,
}
"""The servers that the config has sections for."""


class HostPorts:
    """What this process holds, until it ends."""

    def __init__(self) -> None:
        self._held: dict[Endpoint, socket.socket] = {}

    def hold(self, host: str, port: int) -> bool:
        """Keep a port from all others that ask so; False where somebody else has it."""
        if (host, port) in self._held:
            return True
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            holder.bind(f"\0{_NAME} {host} {port}")
        except OSError:
            holder.close()
            return False
        # Whoever listens on all addresses has the port of each. Both bind before they look: one of two sees
        # the other, or both do and take other ports.
        others = [each for each in _held_here() if each[1] == port and each not in self._held]
        if any(each != host and (each in EVERY_HOST or host in EVERY_HOST) for each, _ in others):
            holder.close()
            return False
        self._held[host, port] = holder
        return True

    def release(self) -> None:
        """Let all of them go."""
        for holder in self._held.values():
            holder.close()
        self._held.clear()


def _held_here() -> list[Endpoint]:
    """What anybody holds on this host."""
    words = [line.split() for line in _SOCKETS.read_text().splitlines()]
    return [(each[-2], int(each[-1])) for each in words if f"@{_NAME}" in each]


@dataclass(frozen=True)
class HeadPlaces:
    """Where the head's servers listen.

    Attributes:
        servers: host and port of those that the config has sections for.
        metrics: of Ray's autoscaler, and of its dashboard.
    """

    gcs_port: int
    client_port: int
    metrics: tuple[int, int]
    servers: Mapping[str, Endpoint]


def choose_places(
    ports: HostPorts,
    address: str,
    wanted: Mapping[str, tuple[str | None, int | None]],
    on_network: Collection[str],
) -> HeadPlaces:
    """Places for the head of a cluster.

    Args:
        ports: holds them.
        address: of this host, in the network of the nodes.
        wanted: host and port that the config names for a server.
        on_network: the servers that listen there where the config names no host; others do on loopback.

    Raises:
        RequestError: a port that the config names is taken, or a host is not this one's.
    """
    _, gcs = choose_endpoint("address", EndpointConfig(), EVERYWHERE, GCS_PORT, [], ports.hold)
    chosen: list[Endpoint] = [("", gcs)]
    servers: dict[str, Endpoint] = {}
    for key, usual in USUAL.items():
        host, port = wanted.get(key, (None, None))
        own = address if key in on_network else own_address()
        servers[key] = choose_endpoint(
            key, EndpointConfig(host=host, port=port), own, usual, chosen, ports.hold
        )
        chosen.append(servers[key])

    def further() -> int:
        port = free_port(EVERYWHERE, chosen, ports.hold)
        chosen.append(("", port))
        return port

    return HeadPlaces(gcs, further(), (further(), further()), servers)
