"""Serve's side of the apps: applications are made, sized, looked at and deleted here, and nowhere else."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serve_apps.spec import DEPLOYMENT, GATEWAY, AppSpec

if TYPE_CHECKING:
    from ray.serve import Application

MOST_REPLICAS = 10_000
"""Serve's own bound, which is nobody's: the controller of the apps decides."""
METRICS_INTERVAL_S = 0.5
SHUTDOWN_LOOK_EVERY_S = 0.5
_PICKLING = threading.Lock()
"""Held while Serve makes configs, those of its status included: with each it pickles the class of a request
router, and to do so marks a module in a table of the whole process."""
LINES = 30
"""How much of what Serve says about a failure is handed on."""
_OUR_ERROR = re.compile(r"^(?:serve_apps|cluster)(?:\.\w+)+: ", re.MULTILINE)
"""How the line of a traceback begins that tells of an error of Shoal's own."""
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Served:
    """One application, as Serve tells of it."""

    status: str
    """Serve's, in lower case: deploying, running, unhealthy, deploy_failed, deleting."""
    ready: int
    failure: str | None
    """Why it could not be started."""


def application(spec: AppSpec, name: str, replicas: int) -> Application:
    """The Serve application of one revision of an app, which begins with so many replicas."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.schema import LoggingConfig

    from serve_apps.engine_config import replica_bundles
    from serve_apps.replica import Replica
    from serve_apps.routing import ROUTER

    bundles = replica_bundles(spec)
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": {
            "num_cpus": bundles[0].get("CPU", 0.0),
            "num_gpus": bundles[0].get("GPU", 0.0),
        },
        "placement_group_bundles": bundles,
        "placement_group_strategy": "STRICT_PACK",
        "placement_group_bundle_label_selector": spec.bundle_labels(len(bundles)),
        # What does not fit in the batch waits at the gateway, where a new replica can take it.
        "max_ongoing_requests": spec.config.limits.batch,
        "autoscaling_config": AutoscalingConfig(
            min_replicas=0,
            max_replicas=MOST_REPLICAS,
            initial_replicas=replicas,
            metrics_interval_s=METRICS_INTERVAL_S,
            look_back_period_s=1.0,
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy=AutoscalingPolicy(
                policy_function="serve_apps.serve_policy:ControlledSize", policy_kwargs={"application": name}
            ),
        ),
        "request_router_config": RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"policy": spec.config.routing},
            # A waiting request asks this often whether a place has become free.
            max_backoff_s=0.05,
        ),
        # The gateway's log has a line for each request.
        "logging_config": LoggingConfig(enable_access_log=False),
        # A second try is for accidents; then it says why.
        "max_constructor_retry_count": 2,
        # Replicas that are taken away finish what they have.
        "graceful_shutdown_timeout_s": spec.config.limits.request_timeout_s,
        "graceful_shutdown_wait_loop_s": SHUTDOWN_LOOK_EVERY_S,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 30.0,
    }
    return serve.deployment(Replica, **options).bind(spec.as_json(), name)


def start(spec: AppSpec, name: str, replicas: int) -> None:
    """Have Serve start an application; returns before it is ready."""
    from ray import serve

    with _PICKLING:
        target = serve.RunTarget(target=application(spec, name, replicas), name=name, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)


def delete(name: str) -> None:
    """Have Serve end an application, and wait until its replicas have finished what they had."""
    from ray import serve

    serve.delete(name)


def look() -> dict[str, Served]:
    """The applications that Serve has, the gateway's left out."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus, ReplicaState

    found = {}
    with _PICKLING:
        status = serve.status()
    for name, overview in status.applications.items():
        if name == GATEWAY:
            continue
        deployment = overview.deployments.get(DEPLOYMENT)
        ready = deployment.replica_states.get(ReplicaState.RUNNING, 0) if deployment else 0
        failed = overview.status == ApplicationStatus.DEPLOY_FAILED
        found[name] = Served(overview.status.value.lower(), ready, reason(overview) if failed else None)
    return found


def replica_nodes() -> dict[str, tuple[str, ...]]:
    """By application, the node ids of its replicas, those that start and those that drain included.

    A replica holds its devices as a placement group, to which Serve gives the replica's full id as name.
    """
    from ray.util import placement_group_table

    nodes: dict[str, list[str]] = {}
    for group in placement_group_table().values():
        kind, _, rest = str(group.get("name", "")).partition("SERVE_REPLICA::")
        application, found, _ = rest.partition("#")
        if not kind and found and group.get("state") == "CREATED":
            nodes.setdefault(application, []).append(next(iter(group["bundles_to_node_id"].values())))
    return {application: tuple(sorted(each)) for application, each in nodes.items()}


def reason(overview: Any) -> str:
    """Why an application failed, from what Serve says about it and its deployments.

    An error of Shoal's own says all by itself; of another the end of its traceback is handed on.
    """
    deployments: Mapping[str, Any] = overview.deployments
    messages = [overview.message, *(each.message for each in deployments.values())]
    text = "\n".join(dict.fromkeys(m.strip() for m in messages if m.strip()))
    *_, said = _OUR_ERROR.split(text)
    if _TRACEBACK not in said:
        # Nothing came after it, so that it is what the replica ended with.
        text = said
    return "\n".join(text.splitlines()[-LINES:]) or f"status {overview.status.value}"
