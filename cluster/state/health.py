"""Whether Ray's servers answer, asked by gRPC's standard health check without joining the cluster."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
"""https://github.com/grpc/grpc/blob/master/doc/health-checking.md; it asks for no token."""
TIMEOUT_S = 3.0
POLL_S = 0.05


def _channel(address: str) -> grpc.Channel:
    """A channel as Ray's own are: with TLS where RAY_USE_TLS says so, by the certificates that Ray names."""
    import grpc

    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address)
    names = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
    parts = [Path(os.environ[name]).read_bytes() if name in os.environ else None for name in names]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*parts))


def answers(address: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether a gRPC server at HOST:PORT answers its health check; False for a dead or frozen one."""
    import grpc

    with _channel(address) as channel:
        try:
            channel.unary_unary(HEALTH_CHECK)(b"", timeout=timeout_s)
        except grpc.RpcError:
            return False
    return True


def silent(addresses: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> list[str]:
    """The names, of {name: HOST:PORT}, that do not answer; all are asked at once."""
    channels = {name: _channel(address) for name, address in addresses.items()}
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
