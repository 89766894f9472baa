"""Which apps run, and as what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve_apps.spec import DEPLOYMENT, GATEWAY, AppSpec

TIMEOUT_S = 5.0


def app_statuses() -> list[dict[str, Any]]:
    """One row an app: name, model, status, replicas (that run), tensor; needs a connection to the cluster.

    `status` is Serve's, in lower case (deploying, running, unhealthy, deploy_failed, deleting). `model` and
    `tensor` are None for an app that has never been ready.
    """
    from ray import serve
    from ray.serve.schema import ReplicaState

    applications = serve.status().applications
    deployed = deployed_apps() if GATEWAY in applications else {}
    rows = []
    for name, overview in sorted(applications.items()):
        if name == GATEWAY or DEPLOYMENT not in overview.deployments:
            continue
        app = deployed.get(name)
        states = overview.deployments[DEPLOYMENT].replica_states
        rows.append(
            {
                "name": name,
                "model": app.spec.model_version if app else None,
                "status": overview.status.value.lower(),
                "replicas": states.get(ReplicaState.RUNNING, 0),
                "tensor": app.spec.config.tensor if app else None,
            }
        )
    return rows


@dataclass(frozen=True)
class DeployedApp:
    """An app as the gateway knows it."""

    spec: AppSpec
    ready: bool


def deployed_apps() -> dict[str, DeployedApp]:
    """What each app was deployed with; empty while there is no gateway that answers."""
    # Over HTTP, since a Serve handle would leave threads behind that outlive this process's connection.
    import httpx

    from cluster.api_keys import cluster_token
    from cluster.sharing.client import BrokerClient

    info = BrokerClient().info()
    url = f"http://{info['gateway_host']}:{info['gateway_port']}/apps"
    try:
        headers = {"authorization": f"Bearer {cluster_token()}"}
        answer = httpx.get(url, headers=headers, timeout=TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
    except httpx.HTTPError:
        # The gateway is starting or coming back; what runs is known without it.
        return {}
    return {
        app: DeployedApp(AppSpec.from_json(facts["spec"]), facts["ready"])
        for app, facts in answer.json().items()
    }
