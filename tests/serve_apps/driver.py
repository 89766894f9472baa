"""A driver of the cluster in a process of its own.

Ray reads the authentication mode once in a process, when it is imported; which test has imported it before
must not matter. The functions here run in that process.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from cluster.record import ClusterRecord
from serve_apps.spec import AppSpec

Result = TypeVar("Result")
READY_TIMEOUT_S = 90.0


class Driver:
    """Runs functions in a process that is connected to a cluster."""

    def __init__(self, record: ClusterRecord) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=_join, initargs=(record,))

    def __call__(self, function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        return self._pool.submit(function, *arguments, **named).result()

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()


def _join(record: ClusterRecord) -> None:
    from cluster.connection import connect

    connect(record)


def start() -> str:
    """Start Serve and the gateway; the gateway's URL."""
    from cluster.sharing.client import BrokerClient
    from serve_apps.app import start_serve

    info = BrokerClient().info()
    start_serve(info, time.monotonic() + READY_TIMEOUT_S)
    return f"http://{info['gateway_host']}:{info['gateway_port']}"


def stop() -> None:
    """End Serve with everything in it."""
    from ray import serve

    serve.shutdown()


def deploy(spec: AppSpec, **options: Any) -> list[dict[str, Any]]:
    from cluster.sharing.client import BrokerClient
    from serve_apps.app import deploy_specs

    return deploy_specs([spec], BrokerClient(), deadline=time.monotonic() + READY_TIMEOUT_S, **options)


def remove(names: Sequence[str]) -> None:
    from serve_apps import app

    app.remove(names)


def leases() -> dict[str, dict[str, Any]]:
    """The leases by holder."""
    from cluster.sharing.client import BrokerClient

    return {row["holder"]: row for row in BrokerClient().leases()}


def running_replicas(app: str) -> int:
    from serve_apps.status import app_statuses

    return next((row["replicas"] for row in app_statuses() if row["name"] == app), 0)


def replica_nodes(app: str) -> tuple[str, ...]:
    from serve_apps import autoscaling

    return autoscaling.replica_nodes(app)


def rank_beside(replica: str) -> int:
    """The process of rank 1 of a replica: the actor in the replica's placement group."""
    from ray.util.state import list_actors

    rows = list_actors(filters=[("state", "=", "ALIVE")], limit=1000, detail=True)
    home = next(row for row in rows if row.name and row.name.endswith(f"#{replica}"))
    ranks = [r for r in rows if r.class_name == "_Rank" and r.placement_group_id == home.placement_group_id]
    assert len(ranks) == 1
    return int(ranks[0].pid)
