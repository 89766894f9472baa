"""Starting a gateway as a Serve application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.reading.api_keys import load_keys
from cluster.ray_private import HEAD_RESOURCE
from serve_apps.front.secret import front_secret
from serve_apps.spec import GATEWAY, gateway_of

_NODE_ID_LABEL = "ray.io/node-id"
"""Ray's own, of every node."""


def start_gateway(info: Mapping[str, Any], node_id: str | None = None) -> None:
    """Give Serve the gateway of a node; returns before it is ready. The apps' controller does so when it is
    not there.

    Args:
        info: the broker's facts about the cluster.
        node_id: None: the head, where people look for it, also when another has become the head.

    Raises:
        RequestError: its keys cannot be read.
        *SERVE_GONE: see `serve_application`.
    """
    from ray import serve

    from serve_apps.controller.serve_application import own_runtime_env, run
    from serve_apps.gateway.deployment import DRAIN_S, Gateway, GatewayPlace

    keys, front = info.get("gateway_keys"), info.get("gateway_front")
    if keys is not None:
        load_keys(keys)
    alone = info.get("gateway_count", 1) == 1
    if front:
        port = front["node_port"]
        # The one gateway is asked by its front alone, which is on the same node.
        host = info["gateway_host"] if alone and port is None else None
        place = GatewayPlace(host, port or 0, or_next=port is not None)
    elif node_id is None:
        place = GatewayPlace(info["gateway_host"], info["gateway_port"])
    else:
        place = GatewayPlace(None, info["gateway_port"], or_next=True)
    on_node: dict[str, Any] = {"resources": {HEAD_RESOURCE: 0.001}}
    if node_id is not None:
        on_node = {"label_selector": {_NODE_ID_LABEL: node_id}}
    options = {
        **info.get("gateway_options", {}),
        "alone": alone,
        "front_secret": front_secret(info) if front else None,
    }

    def make() -> serve.Application:
        gateway = serve.deployment(
            Gateway,
            name=GATEWAY,
            num_replicas=1,
            ray_actor_options={"num_cpus": 0, **on_node, **own_runtime_env()},
            health_check_period_s=0.5,
            graceful_shutdown_timeout_s=DRAIN_S + 10,
        )
        return gateway.bind(place, keys is not None, options)

    run(make, GATEWAY if node_id is None else gateway_of(node_id))
