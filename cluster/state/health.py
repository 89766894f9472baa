"""Whether Ray's servers answer, asked by gRPC's standard health check without joining the cluster."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ShoalError

if TYPE_CHECKING:
    import grpc

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
"""https://github.com/grpc/grpc/blob/master/doc/health-checking.md; it asks for no token."""
TIMEOUT_S = 3.0
POLL_S = 0.05


USE_TLS = "RAY_USE_TLS"
CERTIFICATES = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
"""https://docs.ray.io/en/latest/ray-core/configure.html#tls-authentication: of whom Ray's channels trust, and
of this node; paths."""


def tls_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of Ray's variables that say whether its channels go over TLS, and by which files."""
    if not _over_tls(environment):
        return {USE_TLS: "0"}
    files = {name: os.path.abspath(environment[name]) for name in CERTIFICATES if name in environment}
    return {USE_TLS: "1", **files}


def _over_tls(environment: Mapping[str, str]) -> bool:
    return environment.get(USE_TLS, "0").lower() in ("1", "true")


def _channel(address: str, environment: Mapping[str, str] | None) -> grpc.Channel:
    """A channel as Ray's own are under these variables; None for those of this process.

    Raises:
        ShoalError: a file of theirs cannot be read.
    """
    import grpc

    if environment is None:
        environment = os.environ
    if not _over_tls(environment):
        return grpc.insecure_channel(address)
    parts = []
    for name in CERTIFICATES:
        try:
            parts.append(Path(environment[name]).read_bytes() if name in environment else None)
        except OSError as error:
            raise ShoalError(f"{name}: {error.strerror}: {environment[name]}") from error
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*parts))


def answers(address: str, timeout_s: float = TIMEOUT_S, environment: Mapping[str, str] | None = None) -> bool:
    """Whether a gRPC server at HOST:PORT answers its health check; False for a dead or frozen one.

    Args:
        environment: with `tls_variables`; by default that of this process.
    """
    import grpc

    with _channel(address, environment) as channel:
        try:
            channel.unary_unary(HEALTH_CHECK)(b"", timeout=timeout_s)
        except grpc.RpcError:
            return False
    return True


def listens(address: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether anything at all takes connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError:
        return False
    return True


def silent(
    addresses: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """The names, of {name: HOST:PORT}, that do not answer; all are asked at once. See `answers`."""
    channels = {name: _channel(address, environment) for name, address in addresses.items()}
    calls = {
        name: channel.unary_unary(HEALTH_CHECK).future(b"", timeout=timeout_s)
        for name, channel in channels.items()
    }
    failed = [name for name, call in calls.items() if call.exception() is not None]
    for channel in channels.values():
        channel.close()
    return failed


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    """Whether the condition became true within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() >= deadline:
            return False
        pause.wait(poll_s)
    return True
