"""Serve applications from the config: the lease, the replicas, the gateway, and their end."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cluster.config import ShoalConfig
from cluster.errors import RequestError, ShoalError
from serve_apps.spec import DEPLOYMENT, GATEWAY, AppSpec

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.schema import ApplicationStatusOverview

    from cluster.sharing.client import BrokerClient

LEASE_TIMEOUT_S = 30.0
"""How long an app waits for the devices of its smallest size."""
READY_TIMEOUT_S = 300.0
POLL_S = 0.2
METRICS_INTERVAL_S = 0.5
LOOK_BACK_S = 1.0
"""Load is averaged over this long: a scale-out begins within about this and the app's upscale delay."""

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
    that differs is updated in place by Serve, a replica at a time.

    Returns:
        {"base_url", "apps": [{"name", "model", "status", "replicas", "tensor"}]}

    Raises:
        RequestError: no such app, or no such model.
        ShoalError: no room for an app's smallest size, or it was not ready in time; a new app that failed is
            taken down again.
    """
    from cluster.sharing.client import BrokerClient

    broker = BrokerClient()
    info = broker.info()
    chosen = list(names) or list(config.serve_apps)
    if not chosen:
        raise RequestError("the config has no serve_apps; `shoal init` shows how one is written")
    specs = [resolve(config, name, info["storage"]) for name in chosen]
    base_url = f"http://{info['gateway_host']}:{info['gateway_port']}/v1"
    deadline = time.monotonic() + timeout_s
    start_serve(info, deadline)
    return {"base_url": base_url, "apps": deploy_specs(specs, broker, deadline=deadline, say=say)}


def resolve(config: ShoalConfig, name: str, storage: str) -> AppSpec:
    """The spec of an app of the config, with its model found.

    Raises:
        RequestError: there is no such app, or no such model.
    """
    from cluster.registry import Registry
    from cluster.storage import Storage

    app = config.serve_apps.get(name)
    if app is None:
        known = ", ".join(config.serve_apps) or "none"
        raise RequestError(f"there is no app '{name}' in the config; serve_apps has: {known}")
    if app.model.startswith((".", "/")):
        if not os.path.isfile(os.path.join(app.model, "config.json")):
            raise RequestError(
                f"serve_apps.{name}.model: {app.model} is no Hugging Face model directory"
                " (it has no config.json)"
            )
        path = os.path.abspath(app.model)
        return AppSpec(name, app, model_path=path, model_version=os.path.basename(path))
    place = Storage(storage)
    version = Registry(place).resolve(app.model)
    local = place.local_path() is not None
    return AppSpec(
        name,
        app,
        model_path=version.path if local else "",
        model_version=version.reference,
        storage=None if local else storage,
    )


def deploy_specs(
    specs: Sequence[AppSpec],
    broker: BrokerClient,
    *,
    deadline: float,
    lease_timeout_s: float = LEASE_TIMEOUT_S,
    say: Progress = _quiet,
) -> list[dict[str, Any]]:
    """Lease, deploy and wait; the rows of `app_statuses` for these apps. Serve and the gateway must run."""
    from ray import serve

    from serve_apps.status import app_statuses, deployed_apps

    running = deployed_apps()
    changed = []
    for spec in specs:
        held = running.get(spec.name)
        if held is not None and held.ready and held.spec == spec:
            say(f"{spec.name}: runs already as the config says")
            continue
        changed.append(spec)
    targets = []
    for spec in changed:
        say(f"{spec.name}: waiting for {spec.config.replicas.min} × {_amounts(spec.replica_resources)}")
        _lease(spec, broker, lease_timeout_s)
        targets.append(serve.RunTarget(target=application(spec), name=spec.name, route_prefix=None))
    if targets:
        say(f"starting {', '.join(spec.name for spec in changed)}")
        serve.run_many(targets, wait_for_applications_running=False)
    for spec in changed:
        try:
            _wait_running(spec, deadline, say)
        except ShoalError:
            if spec.name not in running:
                remove([spec.name], broker)
            raise
    _wait_known(specs, deadline)
    names = {spec.name for spec in specs}
    return [row for row in app_statuses() if row["name"] in names]


def application(spec: AppSpec) -> Application:
    """The Serve application of one version of an app."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from serve_apps.engine_table import find_engine
    from serve_apps.replica import Replica
    from serve_apps.routing import ROUTER

    policy = AutoscalingPolicy(
        policy_function="serve_apps.autoscaling:ServingPolicy",
        policy_kwargs={
            "app": spec.name,
            "unit": spec.replica_resources,
            "min_replicas": spec.config.replicas.min,
            "max_replicas": spec.config.replicas.most,
            "target_ongoing_requests": spec.config.autoscale.target_ongoing_requests,
            "upscale_delay_s": spec.config.autoscale.upscale_delay_s,
            "downscale_delay_s": spec.config.autoscale.downscale_delay_s,
        },
    )
    if find_engine(spec.engine).has_own_ranks:
        # The process of rank 0 has the devices of all, and starts the others on them.
        bundles = [spec.replica_resources]
    else:
        bundles = [spec.rank_resources] * spec.config.ranks
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": {
            "num_cpus": bundles[0].get("CPU", 0.0),
            "num_gpus": bundles[0].get("GPU", 0.0),
        },
        "placement_group_bundles": bundles,
        "placement_group_strategy": "STRICT_PACK",
        # What does not fit in the batch waits at the gateway, where a new replica can take it.
        "max_ongoing_requests": spec.config.limits.batch,
        "autoscaling_config": AutoscalingConfig(
            min_replicas=spec.config.replicas.min,
            max_replicas=spec.config.replicas.most,
            target_ongoing_requests=spec.config.autoscale.target_ongoing_requests,
            metrics_interval_s=METRICS_INTERVAL_S,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy=policy,
        ),
        "request_router_config": RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"policy": spec.config.routing},
            # A waiting request asks this often whether a place has become free.
            max_backoff_s=0.05,
        ),
        # A second try is for accidents; then it says why.
        "max_constructor_retry_count": 2,
        # Replicas that are taken away finish what they have.
        "graceful_shutdown_timeout_s": spec.config.limits.request_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 30.0,
    }
    return serve.deployment(Replica, **options).bind(spec.as_json())


def remove(names: Sequence[str], broker: BrokerClient | None = None) -> None:
    """Take apps down; requests that run are finished first. The gateway stays.

    Raises:
        RequestError: an app is not there; nothing was taken down.
    """
    from ray import serve

    from cluster.sharing.client import BrokerClient
    from serve_apps.autoscaling import SILENCE_S
    from serve_apps.status import deployed_apps

    broker = broker or BrokerClient()
    running = {app for app in serve.status().applications if app != GATEWAY}
    unknown = [name for name in names if name not in running]
    if unknown:
        runs = f"these run: {', '.join(sorted(running))}" if running else "none runs"
        raise RequestError(f"no app '{unknown[0]}' is served; {runs}")
    deployed = deployed_apps()
    for name in names:
        app = deployed.get(name)
        with _held_lease(app.spec if app else None, broker):
            serve.delete(name)
        _release(f"app/{name}", broker, SILENCE_S)


def start_serve(info: Mapping[str, Any], deadline: float) -> None:
    """Start Serve and the gateway; what runs stays."""
    from ray import serve

    # Serve tells on standard error that it connects; what people need to know, `say` tells them.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # The gateway listens itself; see there.
    serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False})
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
            health_check_period_s=2.0,
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


def _lease(spec: AppSpec, broker: BrokerClient, timeout_s: float) -> None:
    """Have the broker grant the app's smallest size; the autoscaling policy keeps the lease from then on."""
    from cluster.sharing.demand import Demand
    from serve_apps.autoscaling import replica_nodes

    held = replica_nodes(spec.name)
    demand = Demand(
        holder=spec.holder,
        kind="serving",
        unit=spec.replica_resources,
        min=spec.config.replicas.min,
        max=max(spec.config.replicas.min, len(held)),
        held=held,
    )
    try:
        broker.wait(demand, timeout_s)
    except ShoalError as error:
        raise ShoalError(
            f"{error}; free in the whole cluster now: {_free()}, and the ranks of a replica share one node"
        ) from error


def _free() -> str:
    """What nobody holds, for people."""
    import ray

    free = ray.available_resources()
    return _amounts({name: free.get(name, 0.0) for name in ("CPU", "GPU") if name in ray.cluster_resources()})


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _wait_running(spec: AppSpec, deadline: float, say: Progress) -> None:
    from ray.serve.schema import ApplicationStatus, ReplicaState

    reported = -1

    def ready(overview: ApplicationStatusOverview) -> bool:
        nonlocal reported
        replicas = 0
        if DEPLOYMENT in overview.deployments:
            replicas = overview.deployments[DEPLOYMENT].replica_states.get(ReplicaState.RUNNING, 0)
        if replicas != reported:
            say(f"{spec.name}: {replicas} of {spec.config.replicas.min} replicas run")
            reported = replicas
        return overview.status == ApplicationStatus.RUNNING and replicas >= spec.config.replicas.min

    _wait(spec.name, deadline, ready)


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
                raise ShoalError(f"{name} could not be started: {_reason(overview)}")
            if ready(overview):
                return
        if time.monotonic() >= deadline:
            reason = _reason(overview) if overview is not None else "Serve does not know it"
            raise ShoalError(f"{name} was not ready in time: {reason}")
        pause.wait(POLL_S)


def _reason(overview: ApplicationStatusOverview) -> str:
    """The end of what Serve says about an application and its deployments, tracebacks included."""
    messages = [overview.message, *(d.message for d in overview.deployments.values())]
    text = "\n".join(dict.fromkeys(m.strip() for m in messages if m.strip()))
    lines = text.splitlines()
    return "\n".join(lines[-30:]) or f"status {overview.status.value}"


def _wait_known(specs: Sequence[AppSpec], deadline: float) -> None:
    """Wait until the gateway sends requests to these versions."""
    from serve_apps.status import DeployedApp, deployed_apps

    pause = threading.Event()
    while True:
        known = deployed_apps()
        missing = [s.name for s in specs if known.get(s.name) != DeployedApp(s, ready=True)]
        if not missing:
            return
        if time.monotonic() >= deadline:
            raise ShoalError(f"the gateway did not take up {', '.join(missing)} in time")
        pause.wait(POLL_S)


@contextmanager
def _held_lease(spec: AppSpec | None, broker: BrokerClient) -> Iterator[None]:
    """Keep an app's lease while its replicas drain: the policy that kept it is not called any more."""
    from cluster.sharing.demand import Demand
    from serve_apps.autoscaling import HEARTBEAT_S, replica_nodes

    done = threading.Event()

    def keep(spec: AppSpec) -> None:
        while not done.wait(HEARTBEAT_S):
            held = replica_nodes(spec.name)
            demand = Demand(spec.holder, "serving", spec.replica_resources, min=0, max=len(held), held=held)
            broker.request(demand)

    if spec is None:
        # It was never ready; what it holds is freed at once.
        yield
        return
    thread = threading.Thread(target=keep, args=(spec,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _release(holder: str, broker: BrokerClient, silence_s: float) -> None:
    """End a lease for good: a heartbeat of the policy may still have been on its way."""
    pause = threading.Event()
    broker.release(holder)
    deadline = time.monotonic() + silence_s + 2 * POLL_S
    while time.monotonic() < deadline:
        pause.wait(POLL_S)
        if any(row["holder"] == holder for row in broker.leases()):
            broker.release(holder)
