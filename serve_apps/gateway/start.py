"""Starting the gateway as a Serve application."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cluster.errors import ShoalError
from serve_apps.controller.serve_state import reason
from serve_apps.spec import GATEWAY

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

LOOK_EVERY_S = 0.2


def start_gateway(info: Mapping[str, Any], deadline: float) -> None:
    """Deploy the gateway if it does not run."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    overview = serve.status().applications.get(GATEWAY)
    if overview is None or overview.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.DELETING):
        from serve_apps.gateway.deployment import Gateway

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
                    target=gateway.bind(
                        info["gateway_host"],
                        info["gateway_port"],
                        info.get("gateway_keys"),
                        info.get("gateway_options", {}),
                    ),
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
        pause.wait(LOOK_EVERY_S)
