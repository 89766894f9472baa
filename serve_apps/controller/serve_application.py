"""The Serve application of one version of an app: how it is made, started and deleted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.serve.exceptions import RayServeException

from serve_apps.controller.serve_state import MAKING_CONFIGS
from serve_apps.replica.serve_private import NoServeError, find_serve, wait_for_no_proxies
from serve_apps.spec import DEPLOYMENT, AppSpec

if TYPE_CHECKING:
    from ray.serve import Application

SERVE_GONE = (NoServeError, ray.exceptions.RayActorError, RayServeException)
"""What a call of Serve raises that does not run, or ends meanwhile."""
MOST_REPLICAS = 10_000
"""Serve's own bound, which is nobody's: the controller of the apps decides."""
METRICS_INTERVAL_S = 0.5
SHUTDOWN_LOOK_EVERY_S = 0.5


def application(spec: AppSpec, name: str, replicas: int) -> Application:
    """The Serve application of one revision of an app, which begins with so many replicas."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.schema import LoggingConfig

    from serve_apps.replica.deployment import Replica
    from serve_apps.routing import ROUTER

    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        # It holds nothing: what its engine has is granted to the app (EngineKeeper), on whichever node.
        "ray_actor_options": {"num_cpus": 0, **own_runtime_env()},
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
                policy_function="serve_apps.controller.size_policy:ControlledSize",
                policy_kwargs={"application": name},
            ),
        ),
        "request_router_config": RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"policy": spec.config.routing, "app": spec.name, "application": name},
            # One that may go to none of those with room asks this often whether it may.
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


def own_runtime_env() -> dict[str, Any]:
    """What of this process' environment `up` gave it beside that of its node, for the actors of Serve too:
    they are started by Serve, which may be somebody else's."""
    if not ray.is_initialized():  # asked of the context, Ray would start a cluster of its own
        return {}
    variables = ray.get_runtime_context().runtime_env.get("env_vars", {})
    return {"runtime_env": {"env_vars": dict(variables)}} if variables else {}


def start(spec: AppSpec, name: str, replicas: int) -> None:
    """Have Serve start an application; returns before it is ready.

    A Serve that is being shut down takes no application and says nothing of it.

    Raises:
        *SERVE_GONE: Serve does not run, or has ended meanwhile.
    """
    run(lambda: application(spec, name, replicas), name)


def run(make: Callable[[], Application], name: str) -> None:
    """Give Serve the application that `make` makes, for which nobody waits.

    Raises:
        *SERVE_GONE: see `start`.
    """
    from ray import serve

    if find_serve() is None:
        raise NoServeError(f"Serve does not run, and so cannot start {name}")
    # Every look at Serve needs the lock: under it nothing is waited for but Serve's controller, as by a look.
    wait_for_no_proxies()
    with MAKING_CONFIGS:
        serve.run_many(
            [serve.RunTarget(target=make(), name=name, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )


def delete(name: str) -> None:
    """Have Serve end an application, and wait until its replicas have finished what they had."""
    from ray import serve

    serve.delete(name)
