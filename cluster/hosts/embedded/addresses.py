"""Which loopback addresses the nodes of an embedded cluster get: pure arithmetic, no sockets.

All of 127.0.0.0/8 belongs to this machine. A cluster takes 127.A.B.10, .11, … with A.B from its name, so
that two clusters meet neither each other nor what listens on 127.0.0.1, and the same name comes back under
the same addresses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from cluster.errors import RequestError, ShoalError

SERVE_PROXY_HOST = 2
"""Of Ray Serve's own proxy: a cluster's own too, and no node's, whose gateway has the same usual port."""
FIRST_HOST = 10
LAST_HOST = 254
SUBNETS = 254 * 256
"""127.1.0 to 127.254.255; 127.0 is everybody's."""


def subnet_of(address: str) -> str | None:
    """`127.A.B` of a loopback address outside 127.0, else None."""
    parts = address.removeprefix("::ffff:").split(".")
    if len(parts) != 4 or parts[0] != "127" or parts[1] == "0":
        return None
    return ".".join(parts[:3])


def subnets_of(addresses: Iterable[str]) -> set[str]:
    """The loopback subnets, outside 127.0, of these addresses."""
    return {subnet for address in addresses if (subnet := subnet_of(address)) is not None}


def choose_subnet(name: str, taken: Collection[str]) -> str:
    """The subnet of a cluster: the one its name hashes to, or the next one that is not taken.

    Raises:
        ShoalError: every subnet is taken.
    """
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % SUBNETS
    for offset in range(SUBNETS):
        second, third = divmod((start + offset) % SUBNETS, 256)
        subnet = f"127.{second + 1}.{third}"
        if subnet not in taken:
            return subnet
    raise ShoalError("no loopback subnet is free on this machine: all of 127.1.0 to 127.254.255 are in use")


def serve_proxy_address(subnet: str) -> str:
    """Where Ray Serve's own proxy listens."""
    return f"{subnet}.{SERVE_PROXY_HOST}"


def node_addresses(subnet: str, count: int) -> list[str]:
    """The addresses of `count` nodes, the head's first.

    Raises:
        RequestError: the subnet has no room for so many.
    """
    room = LAST_HOST - FIRST_HOST + 1
    if count > room:
        raise RequestError(
            f"cluster.nodes: {count} nodes; the embedded provider starts at most {room} on one machine"
        )
    return [f"{subnet}.{host}" for host in range(FIRST_HOST, FIRST_HOST + count)]
