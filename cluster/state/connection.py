"""Joining a cluster that is up, from this machine."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from cluster.actors import NAMESPACE
from cluster.errors import ShoalError
from cluster.ray_private import give_stdout_back, keep_stdout, read_credentials_again
from cluster.state.health import silent
from cluster.state.record import ClusterRecord, NodeRecord, read_record
from cluster.state.state_directory import state_directory

__all__ = [
    "ClusterRecord",
    "NodeRecord",
    "connect",
    "disconnect",
    "environment",
    "point_at",
    "read_record",
    "require_record",
]


def require_record(name: str) -> ClusterRecord:
    """The record of a cluster that was started.

    Raises:
        ShoalError: it was not, or not yet, or was taken down.
    """
    record = read_record(name)
    if record is not None:
        return record
    if state_directory(name).exists():
        raise ShoalError(
            f"cluster {name} is not up: it is being started, or its start was cut off;"
            " `shoal up` waits for the one and mends the other"
        )
    raise _not_up(name)


def environment(record: ClusterRecord) -> dict[str, str]:
    """The variables under which Ray's own tools (`ray`, `serve`, `ray.init()`) work against the cluster."""
    variables = {
        "RAY_ADDRESS": record.gcs_address,
        "RAY_API_SERVER_ADDRESS": record.dashboard_url,
        "RAY_DASHBOARD_ADDRESS": record.dashboard_url,
        "RAY_AUTH_MODE": "disabled",
        **record.tls,
    }
    if not record.is_here:
        del variables["RAY_ADDRESS"]  # only nodes can join
    if record.token_path is not None:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": record.token_path}
    if record.serve_host is not None:
        variables["RAY_SERVE_DEFAULT_HTTP_HOST"] = record.serve_host
    return variables


def point_at(record: ClusterRecord) -> None:
    """Let what this process and its children do with Ray from now on be done with this cluster.

    Ray's clients find the address and the token in `os.environ` only.
    """
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would win over the path
    os.environ.update(environment(record))
    if "ray" in sys.modules:  # else it reads them when it is imported
        read_credentials_again()


def head_is_silent(record: ClusterRecord) -> str | None:
    """Which part of the head does not answer, in words; None when a connection would work."""
    parts = {"Ray's control store (GCS)": record.gcs_address}
    if record.nodes:
        parts["the head's raylet"] = record.nodes[0].raylet_address
    return ", ".join(f"{part} at {parts[part]}" for part in silent(parts, environment=record.tls)) or None


def connect(record: ClusterRecord) -> None:
    """Make this process a driver of the cluster, in the namespace `shoal`; nothing is done when it is one.

    Sets Ray's variables in `os.environ`, so that what this process starts finds the cluster too. A process
    may join one cluster after another, not two at once.

    Raises:
        ShoalError: the cluster is down or half dead, or this process is in another one.
    """
    if not record.is_here:
        raise ShoalError(
            f"this machine is no node of cluster {record.name}, and only a node can do this: `shoal ssh NODE`"
        )
    missing = head_is_silent(record)
    if missing is not None:
        raise _not_up(record.name, f"{missing} does not answer")
    joined = _joined()
    if joined == record.gcs_address:
        return
    if joined is not None:
        raise ShoalError(f"this process is connected to another Ray cluster ({joined}); disconnect it first")
    point_at(record)

    import ray

    keep_stdout()
    try:
        with _sigterm_kept():
            ray.init(
                address=record.gcs_address,
                namespace=NAMESPACE,
                runtime_env={"env_vars": dict(record.env)} if record.env else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, TimeoutError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ShoalError(f"cluster {record.name} could not be joined: {reason}") from error
    atexit.unregister(disconnect)
    atexit.register(disconnect)  # before Ray does it in its own way


def _joined() -> str | None:
    """The address of the cluster that this process is in."""
    if "ray" not in sys.modules:
        return None
    import ray

    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else None


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep the caller's handler of SIGTERM.

    Ray puts its own there when it connects, which ends the process on the spot, and the system's when it
    leaves.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Ray leaves it alone too
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def disconnect() -> None:
    """Leave the cluster; nothing happens when this process is in none."""
    import ray

    # Ray says now how often it would have said again what it has complained of.
    with _sigterm_kept(), redirect_stdout(sys.stderr):
        ray.shutdown()
    give_stdout_back()


def _not_up(name: str, why: str = "") -> ShoalError:
    return ShoalError(f"cluster {name} is not up{': ' + why if why else ''}: run `shoal up`")
