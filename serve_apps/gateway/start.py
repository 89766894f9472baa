"""Starting the gateway as a Serve application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.ray_private import HEAD_RESOURCE
from serve_apps.spec import GATEWAY


def start_gateway(info: Mapping[str, Any]) -> None:
    """Give Serve the gateway; returns before it is ready. The apps' controller does so when it is not there.

    Args:
        info: the broker's facts about the cluster.

    Raises:
        *SERVE_GONE: see `serve_application`.
    """
    from ray import serve

    from serve_apps.controller.serve_application import own_runtime_env, run
    from serve_apps.gateway.deployment import Gateway

    def make() -> serve.Application:
        gateway = serve.deployment(
            Gateway,
            name=GATEWAY,
            num_replicas=1,
            # On the node where people look for it, also when another has become the head.
            ray_actor_options={
                "num_cpus": 0,
                "resources": {HEAD_RESOURCE: 0.001},
                **own_runtime_env(),
            },
            health_check_period_s=0.5,
        )
        return gateway.bind(
            info["gateway_host"],
            info["gateway_port"],
            info.get("gateway_keys"),
            info.get("gateway_options", {}),
        )

    run(make, GATEWAY)
