"""Serving from the outside: apps are deployed, changed back and taken down by asking the controller."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cluster.config import ShoalConfig
from cluster.errors import RequestError, ShoalError
from serve_apps.controller.client import ControllerClient, start_controller
from serve_apps.models import find_model
from serve_apps.spec import GATEWAY, AppSpec

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

READY_TIMEOUT_S = 600.0
"""How long a command follows a rollout; the rollout itself goes on without it."""
POLL_S = 0.2

Progress = Callable[[str], None]


def _quiet(text: str) -> None:
    pass


def deploy(
    config: ShoalConfig,
    names: Sequence[str] = (),
    *,
    timeout_s: float = READY_TIMEOUT_S,
    say: Progress = _quiet,
) -> dict[str, Any]:
    """Serve apps of the config (all of them by default) and wait until they can answer.

    Needs a connection to the cluster. An app that already runs as the config says is left as it is; one
    that differs is changed by the app's rollout, and this returns when the new version has all requests.

    Returns:
        {"base_url", "apps": [the rows of `app_statuses`]}

    Raises:
        RequestError: no such app, or no such model, or an app that is being changed into something else.
        ShoalError: an app could not be brought there; one that was there before serves as it did.
    """
    from cluster.sharing.client import BrokerClient

    info = BrokerClient().info()
    chosen = list(names) or list(config.serve_apps)
    if not chosen:
        raise RequestError("the config has no serve_apps; `shoal init` shows how one is written")
    specs = [resolve(config, name, info["storage"]) for name in chosen]
    base_url = f"http://{info['gateway_host']}:{info['gateway_port']}/v1"
    deadline = time.monotonic() + timeout_s
    start_serve(info, deadline)
    return {"base_url": base_url, "apps": deploy_specs(specs, deadline=deadline, say=say)}


def resolve(config: ShoalConfig, name: str, storage: str) -> AppSpec:
    """The spec of an app of the config, with its model found.

    Raises:
        RequestError: there is no such app, or no such model.
    """
    app = config.serve_apps.get(name)
    if app is None:
        known = ", ".join(config.serve_apps) or "none"
        raise RequestError(f"there is no app '{name}' in the config; serve_apps has: {known}")
    return find_model(name, app, storage)


def deploy_specs(
    specs: Sequence[AppSpec], *, deadline: float, say: Progress = _quiet
) -> list[dict[str, Any]]:
    """Have the controller bring apps there, and wait; the rows of `app_statuses` for these apps."""
    from serve_apps.status import app_statuses

    controller = ControllerClient()
    numbers: dict[str, int] = {}
    for spec in specs:
        held = controller.describe().get(spec.name)
        if held is not None and held["spec"] == spec.as_json() and held["status"] in ("running", "idle"):
            say(f"{spec.name}: runs already as the config says")
            continue
        numbers[spec.name] = controller.apply(spec)
    # All of them come up side by side.
    for name, number in numbers.items():
        follow(controller, name, number, deadline=deadline, say=say)
    names = {spec.name for spec in specs}
    return [row for row in app_statuses() if row["name"] in names]


def roll_back(name: str, *, timeout_s: float = READY_TIMEOUT_S, say: Progress = _quiet) -> dict[str, Any]:
    """Have an app go back to the version before, and wait until that has all requests; its row.

    Raises:
        RequestError: no such app, or nothing to go back to.
        ShoalError: it could not be brought there in time.
    """
    from serve_apps.status import app_statuses

    controller = ControllerClient.find()
    if controller is None:
        raise RequestError(f"no app '{name}' is served; none runs")
    number = controller.roll_back(name)
    follow(controller, name, number, deadline=time.monotonic() + timeout_s, say=say, back=True)
    return next(row for row in app_statuses() if row["name"] == name)


def follow(
    controller: ControllerClient,
    name: str,
    number: int,
    *,
    deadline: float,
    say: Progress = _quiet,
    back: bool = False,
) -> None:
    """Wait until a revision of an app has all requests, or (`back`) has none any more.

    Raises:
        ShoalError: it failed, or took longer than until the deadline.
    """
    pause = threading.Event()
    said = ""
    while True:
        row = controller.describe().get(name)
        outcome = row["rollout"] if row is not None else controller.outcome(name)
        if outcome is None:
            raise ShoalError(f"{name} was taken down")
        status = outcome["status"]
        if outcome["number"] != number:
            raise ShoalError(f"{name} was changed again, to {outcome['to_version']}, before this had ended")
        failed = status == "failed" or (status == "rolled_back" and not back)
        # A first version that failed takes the app with it.
        if failed and (outcome["strategy"] != "start" or row is None):
            raise ShoalError(_failed(name, outcome, still_there=row is not None))
        switched = outcome.get("switched", False) and not back
        if not failed and row is not None and row["settled"] and (status != "running" or switched):
            if switched and status == "running":
                say(f"{name}: {outcome['to_version']} has all requests; what was before is kept for a while")
            return
        line = _progress(row, outcome)
        if line != said:
            said = line
            say(f"{name}: {line}")
        if time.monotonic() >= deadline:
            raise ShoalError(f"{name} was not ready in time ({line}); `shoal status` shows how it goes on")
        pause.wait(POLL_S)


def _progress(row: Mapping[str, Any] | None, outcome: Mapping[str, Any]) -> str:
    if row is None:
        return "is being taken down"
    if row["status"] == "going_back":
        return f"goes back, {outcome['reason']}"
    change = f"{outcome['strategy']} {outcome['from_version']} → {outcome['to_version']}: "
    ready = outcome.get("ready", row["replicas"])
    if outcome["strategy"] == "start":
        return f"starting {outcome['to_version']}, {ready} of {max(1, row['wanted'])} replicas run"
    if outcome.get("stage") is not None:
        return change + outcome["stage"]
    return change + f"{ready} new replicas run, {row['replicas']} in all"


def _failed(name: str, outcome: Mapping[str, Any], *, still_there: bool) -> str:
    reason = outcome["reason"]
    if outcome["status"] == "rolled_back":
        return f"{name}: the change to {outcome['to_version']} was taken back: {reason}"
    if outcome["strategy"] == "start":
        return f"{name} could not be started: {reason}"
    kept = f"; it still serves {outcome['from_version']}" if still_there else ""
    return f"{name} could not be changed to {outcome['to_version']}{kept}: {reason}"


def remove(names: Sequence[str]) -> None:
    """Take apps down and wait; requests that run are finished first. The gateway stays.

    Raises:
        RequestError: an app is not there; nothing was taken down.
    """
    controller = ControllerClient.find()
    running = controller.describe() if controller is not None else {}
    there = sorted(name for name, row in running.items() if row["status"] != "deleting")
    unknown = [name for name in names if name not in there]
    if unknown or controller is None:
        runs = f"these run: {', '.join(there)}" if there else "none runs"
        raise RequestError(f"no app '{unknown[0]}' is served; {runs}")
    for name in names:
        controller.remove(name)
    pause = threading.Event()
    while any(name in names for name in controller.describe()):
        pause.wait(POLL_S)


def start_serve(info: Mapping[str, Any], deadline: float) -> None:
    """Start Serve, the controller of the apps and the gateway; what runs stays."""
    from ray import serve

    # Serve tells on standard error that it connects; what people need to know, `say` tells them.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # The gateway listens itself; see there.
    serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False})
    start_controller(info)
    _ensure_gateway(info, deadline)


def _ensure_gateway(info: Mapping[str, Any], deadline: float) -> None:
    """Deploy the gateway if it does not run."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    overview = serve.status().applications.get(GATEWAY)
    if overview is None or overview.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.DELETING):
        from serve_apps.gateway import Gateway

        gateway = serve.deployment(
            Gateway,
            name=GATEWAY,
            num_replicas=1,
            # On the node where people look for it; Ray gives each node a resource of its address.
            ray_actor_options={"num_cpus": 0, "resources": {f"node:{info['head_ip']}": 0.001}},
            health_check_period_s=0.5,
        )
        serve.run_many(
            [
                serve.RunTarget(
                    target=gateway.bind(info["gateway_host"], info["gateway_port"], info.get("gateway_keys")),
                    name=GATEWAY,
                    route_prefix=None,
                )
            ],
            wait_for_applications_running=False,
        )
    _wait(GATEWAY, deadline, lambda overview: overview.status == ApplicationStatus.RUNNING)


def _wait(name: str, deadline: float, ready: Callable[[ApplicationStatusOverview], bool]) -> None:
    """Wait until an application is as it should be.

    Raises:
        ShoalError: it failed, or was not ready in time; with what Serve says about it.
    """
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    from serve_apps.controller.applications import reason

    pause = threading.Event()
    while True:
        overview = serve.status().applications.get(name)
        if overview is not None:
            if overview.status == ApplicationStatus.DEPLOY_FAILED:
                raise ShoalError(f"{name} could not be started: {reason(overview)}")
            if ready(overview):
                return
        if time.monotonic() >= deadline:
            why = reason(overview) if overview is not None else "Serve does not know it"
            raise ShoalError(f"{name} was not ready in time: {why}")
        pause.wait(POLL_S)
