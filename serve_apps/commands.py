"""Serving from the outside: apps are deployed, changed back and taken down by asking the controller."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.config.sections.root import ShoalConfig
from cluster.errors import RequestError, ShoalError
from serve_apps.controller.client import ControllerClient, start_controller
from serve_apps.controller.following import LOOK_EVERY_S, Say, follow, say_nothing
from serve_apps.front.front import end_front
from serve_apps.gateway.start import start_gateway
from serve_apps.models import find_model
from serve_apps.spec import AppSpec, is_gateway
from serve_apps.status import app_statuses

READY_TIMEOUT_S = 600.0
"""How long a command follows a rollout; the rollout itself goes on without it."""


def deploy(
    config: ShoalConfig,
    names: Sequence[str] = (),
    *,
    timeout_s: float = READY_TIMEOUT_S,
    say: Say = say_nothing,
) -> dict[str, Any]:
    """Serve apps of the config (all of them by default) and wait until they can answer.

    Needs a connection to the cluster. An app that already runs as the config says is left as it is; one
    that differs is changed by the app's rollout, and this returns when the new version has all requests.

    Returns:
        {"base_url", "apps": [the rows of `app_statuses`]}

    Raises:
        RequestError: no such app, or no such model.
        ShoalError: an app could not be brought there; one that was there before serves as it did.
    """
    from cluster.sharing.client import BrokerClient

    info = BrokerClient().info()
    chosen = list(names) or list(config.serve_apps)
    if not chosen:
        raise RequestError("the config has no serve_apps; `shoal init` shows how one is written")
    specs = [resolve(config, name, info["storage"]) for name in chosen]
    deadline = time.monotonic() + timeout_s
    start_serve(info, deadline, say)
    return {"base_url": info["gateway_url"], "apps": deploy_specs(specs, deadline=deadline, say=say)}


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


def begin_to_deploy(controller: ControllerClient, spec: AppSpec) -> int | None:
    """Have an app served; the number of the rollout that was begun, None where it runs so already."""
    held = controller.describe().get(spec.name)
    if held is not None and held["spec"] == spec.as_json() and held["status"] in ("running", "idle"):
        return None
    return controller.apply(spec)


def deploy_specs(
    specs: Sequence[AppSpec], *, deadline: float, say: Say = say_nothing
) -> list[dict[str, Any]]:
    """Have the controller bring apps there, and wait; the rows of `app_statuses` for these apps."""
    controller = ControllerClient()
    numbers: dict[str, int] = {}
    for spec in specs:
        number = begin_to_deploy(controller, spec)
        if number is None:
            say(f"{spec.name}: runs already as the config says")
        else:
            numbers[spec.name] = number
    # All of them come up side by side.
    for name, number in numbers.items():
        follow(controller, name, number, deadline=deadline, say=say)
    names = {spec.name for spec in specs}
    return [row for row in app_statuses() if row["name"] in names]


def roll_back(name: str, *, timeout_s: float = READY_TIMEOUT_S, say: Say = say_nothing) -> dict[str, Any]:
    """Have an app go back to the version before, and wait until that has all requests; its row.

    Raises:
        RequestError: no such app, or nothing to go back to.
        ShoalError: it could not be brought there in time.
    """
    controller = ControllerClient.find()
    if controller is None:
        raise RequestError(f"no app '{name}' is served; none runs")
    number = controller.roll_back(name)
    follow(controller, name, number, deadline=time.monotonic() + timeout_s, say=say, back=True)
    return next(row for row in app_statuses() if row["name"] == name)


def begin_to_remove(names: Sequence[str]) -> ControllerClient:
    """Have apps taken down; requests that run are finished first. The gateway stays.

    Returns:
        the controller, which lists them until they are gone.

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
    return controller


def remove(names: Sequence[str]) -> None:
    """The same, and wait until they are gone.

    Raises:
        RequestError: an app is not there; nothing was taken down.
    """
    _until_gone(begin_to_remove(names), names)


def _until_gone(controller: ControllerClient, names: Sequence[str]) -> None:
    pause = threading.Event()
    while any(name in names for name in controller.describe()):
        pause.wait(LOOK_EVERY_S)


def served_specs() -> list[dict[str, Any]] | None:
    """The specs of all apps that are served and are to stay, as JSON, by their names; None where nothing has
    been served since the cluster was started."""
    controller = ControllerClient.find()
    if controller is None:
        return None
    rows = controller.describe()
    return [rows[name]["spec"] for name in sorted(rows) if rows[name]["status"] != "deleting"]


def end_serving(say: Say = say_nothing) -> None:
    """Take all apps down, and then the controller, the gateway, and Serve where Shoal has started it and it
    has no application of others. Nothing happens where nothing has been served."""
    from ray import serve

    controller = ControllerClient.find()
    if controller is None:
        return
    names = controller.leave()
    if names:
        say(f"ending {', '.join(names)}")
        _until_gone(controller, names)
    started = controller.serving()["started"]
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it tells of every application that goes
    controller.end()  # it would bring the gateway back
    end_front()
    for gateway in [name for name in serve.status().applications if is_gateway(name)]:
        serve.delete(gateway)
    if started and not serve.status().applications:
        serve.shutdown()


def begin_to_serve(info: Mapping[str, Any]) -> ControllerClient:
    """Have the controller of the apps run; it starts Serve and the gateway, for which this does not wait.

    Args:
        info: the broker's facts about the cluster.

    Raises:
        ShoalError: the controller did not start in time.
    """
    start_controller(info, start_gateway)
    controller = ControllerClient()
    controller.bring_up()
    return controller


def start_serve(info: Mapping[str, Any], deadline: float, say: Say = say_nothing) -> None:
    """Have the controller of the apps run, and with it Serve and the gateway; what runs stays.

    Raises:
        ShoalError: the gateway could not be started, or not in time; with what Serve says about it.
    """
    controller = begin_to_serve(info)
    pause, said = threading.Event(), ""
    while True:
        serving = controller.serving()
        front = serving["front"] or {"runs": True, "failure": None}
        if serving["status"] == "running" and serving["gateway"] == "running" and front["runs"]:
            return
        if serving["failure"] is not None:
            raise ShoalError(f"the gateway could not be started: {serving['failure']}")
        if front["failure"] is not None:
            raise ShoalError(f"the front of the gateways could not be started: {front['failure']}")
        waits = serving["note"] or "Serve and the gateway are being started"
        if serving["note"] and waits != said:
            say(waits)
        said = waits
        if time.monotonic() >= deadline:
            raise ShoalError(f"the gateway was not ready in time: {waits}")
        pause.wait(LOOK_EVERY_S)
