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

import psutil

from cluster.actors import NAMESPACE
from cluster.state.record import ClusterRecord
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
    from cluster.state.connection import connect

    connect(record)


def start() -> str:
    """Start Serve and the gateway; the gateway's URL."""
    from cluster.sharing.client import BrokerClient
    from serve_apps.commands import start_serve

    info = BrokerClient().info()
    start_serve(info, time.monotonic() + READY_TIMEOUT_S)
    return f"http://{info['gateway_host']}:{info['gateway_port']}"


def stop() -> None:
    """End Serve with everything in it, and the controller of the apps."""
    import ray
    from ray import serve

    from serve_apps import commands
    from serve_apps.spec import CONTROLLER
    from serve_apps.status import app_statuses

    commands.remove([row["name"] for row in app_statuses()])
    ray.kill(ray.get_actor(CONTROLLER, namespace=NAMESPACE))
    serve.shutdown()


def end_apps_controller() -> None:
    """End the controller of the apps for good."""
    import ray

    from serve_apps.spec import CONTROLLER

    ray.kill(ray.get_actor(CONTROLLER, namespace=NAMESPACE))


def end_serves_controller() -> None:
    """End Serve's controller for good, as nobody should; what it has started goes on."""
    import ray

    (name,) = [
        each for each in ray.util.list_named_actors(all_namespaces=True) if "CONTROLLER" in each["name"]
    ]
    ray.kill(ray.get_actor(name["name"], namespace=name["namespace"]))


def deploy(spec: AppSpec, **options: Any) -> list[dict[str, Any]]:
    from serve_apps.commands import deploy_specs

    return deploy_specs([spec], deadline=time.monotonic() + READY_TIMEOUT_S, **options)


def roll_back(name: str) -> dict[str, Any]:
    from serve_apps import commands

    return commands.roll_back(name, timeout_s=READY_TIMEOUT_S)


def status(name: str) -> dict[str, Any] | None:
    """The row of an app."""
    from serve_apps.status import app_statuses

    return next((row for row in app_statuses() if row["name"] == name), None)


def remove(names: Sequence[str]) -> None:
    from serve_apps import commands

    commands.remove(names)


def leases() -> dict[str, dict[str, Any]]:
    """The leases by holder."""
    from cluster.sharing.client import BrokerClient

    return {row["holder"]: row for row in BrokerClient().leases()}


def running_replicas(app: str) -> int:
    row = status(app)
    return 0 if row is None else int(row["replicas"])


def replica_nodes(app: str) -> tuple[str, ...]:
    """The nodes of an app's engines, of all its revisions."""
    from serve_apps.controller.engine_devices import look

    mine = [each for each in look() if each.application.partition(":")[0] == app]
    return tuple(sorted(each.node for each in mine if each.node is not None))


def rank_beside(replica: str) -> int:
    """The process of rank 1 of a replica."""
    title = f":{replica}:rank 1"
    (rank,) = [each.pid for each in psutil.process_iter(["cmdline"]) if title in " ".join(_line(each))]
    return rank


def _line(process: psutil.Process) -> list[str]:
    return process.info["cmdline"] or []


def apply(spec: AppSpec) -> int:
    """Ask for a change without waiting for it; the revision's number."""
    from serve_apps.controller.client import ControllerClient

    return ControllerClient().apply(spec)


def controller_pid() -> int:
    """The process of the controller of the apps."""
    from ray.util.state import list_actors

    from serve_apps.spec import CONTROLLER

    rows = list_actors(filters=[("state", "=", "ALIVE"), ("name", "=", CONTROLLER)], detail=True)
    assert len(rows) == 1
    return int(rows[0].pid)
