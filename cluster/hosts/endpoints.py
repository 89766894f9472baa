"""Which host and port our servers get: the config's, the usual, or free ones; asked where they run."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Collection, Sequence

from cluster.config.sections.cluster import EndpointConfig
from cluster.errors import RequestError

Endpoint = tuple[str, int]
NEXT_PORTS = 20
"""So many ports after the usual one are tried before any that is free is taken."""
GATEWAY_PORT = 8000
DASHBOARD_PORT = 8265
API_PORT = 8270
"""The usual ports."""
EVERY_HOST = ("0.0.0.0", "::", "")
_ANOTHERS = "belongs to another cluster that is up"

Hold = Callable[[str, int], bool]
"""Keeps a host's port from all others that ask so; False where somebody else has it."""


def held_by_nobody(host: str, port: int) -> bool:
    """A `Hold` of those who start what listens at once."""
    return True


def free_port(host: str, reserved: Collection[Endpoint] = (), hold: Hold = held_by_nobody) -> int:
    """A port that nothing on `host` listens on now.

    Args:
        reserved: what will be listened on, though perhaps not yet.
        hold: keeps it from others that would choose it now.
    """
    while True:
        with _bound(host, 0) as listener:
            port = int(listener.getsockname()[1])
        if _reserved(host, port, reserved) is None and hold(host, port):
            return port


def free_ports(hosts: Sequence[str], reserved: Collection[Endpoint] = ()) -> list[int]:
    """A free port for each of `hosts`; no two are the same."""
    ports: list[int] = []
    for host in hosts:
        ports.append(free_port(host, [*reserved, *(("", port) for port in ports)]))
    return ports


def choose_endpoint(
    key: str,
    wanted: EndpointConfig,
    own_host: str,
    usual_port: int,
    reserved: Collection[Endpoint],
    hold: Hold = held_by_nobody,
) -> Endpoint:
    """Host and port for one of our servers.

    Args:
        key: its section of the config, for the errors.
        wanted: what the config says.
        own_host: address to bind when the config names none.
        usual_port: port when the config names none; where that is in use the next free one is taken.
        reserved: what other clusters of ours will listen on, though perhaps not yet.
        hold: keeps what is chosen from others that choose now.

    Raises:
        RequestError: the configured port is taken, or the host is not this machine's.
    """
    host = own_host if wanted.host is None else wanted.host
    port = usual_port if wanted.port is None else wanted.port

    def problem_of(port: int) -> str | None:
        found = _reserved(host, port, reserved) or _problem(key, host, port)
        return found if found is not None or hold(host, port) else _ANOTHERS

    problem = problem_of(port)
    if problem is None:
        return host, port
    if wanted.port is not None:
        raise RequestError(f"cluster.{key}.port: {port} on {host} {problem}; choose another or leave it out")
    # The next one, which is easier to remember than any.
    following = range(port + 1, min(port + NEXT_PORTS, 65535))
    free = (each for each in following if problem_of(each) is None)
    return host, next(free, None) or free_port(host, reserved, hold)


def _reserved(host: str, port: int, reserved: Collection[Endpoint]) -> str | None:
    for other_host, other_port in reserved:
        same_host = host == other_host or host in EVERY_HOST or other_host in EVERY_HOST
        if same_host and port == other_port:
            return _ANOTHERS
    return None


def _problem(key: str, host: str, port: int) -> str | None:
    try:
        _bound(host, port).close()
    except socket.gaierror as error:
        raise RequestError(f"cluster.{key}.host: {host!r} is not an address: {error.strerror}") from error
    except PermissionError:
        return "may not be used by this user"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "is taken by another program"
        raise RequestError(
            f"cluster.{key}.host: {host!r} is not an address of this machine ({error.strerror})"
        ) from error
    return None


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # As servers do, so that connections that ended a moment ago do not count as taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
