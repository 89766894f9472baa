"""Which apps run, and as what."""

from __future__ import annotations

from typing import Any

from serve_apps.spec import DEPLOYMENT, GATEWAY

TIMEOUT_S = 5.0


def app_statuses() -> list[dict[str, Any]]:
    """One row an app: name, model, status, replicas (that run), tensor; needs a connection to the cluster.

    `status` is Serve's, in lower case (deploying, running, unhealthy, deploy_failed, deleting). `model` and
    `tensor` are None for an app that has never been ready.
    """
    from ray import serve
    from ray.serve.schema import ReplicaState

    applications = serve.status().applications
    specs = deployed_specs() if GATEWAY in applications else {}
    rows = []
    for name, overview in sorted(applications.items()):
        if name == GATEWAY or DEPLOYMENT not in overview.deployments:
            continue
        spec = specs.get(name, {})
        states = overview.deployments[DEPLOYMENT].replica_states
        rows.append(
            {
                "name": name,
                "model": spec.get("model_version"),
                "status": overview.status.value.lower(),
                "replicas": states.get(ReplicaState.RUNNING, 0),
                "tensor": spec.get("tensor"),
            }
        )
    return rows


def deployed_specs() -> dict[str, dict[str, Any]]:
    """What each app was deployed with, as the gateway knows it: the fields of AppSpec, and `ready`."""
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        return serve.get_app_handle(GATEWAY).refresh.remote().result(timeout_s=TIMEOUT_S)
    except (RayServeException, ray.exceptions.RayError, TimeoutError):
        # The gateway is starting or coming back; what runs is known without it.
        return {}
