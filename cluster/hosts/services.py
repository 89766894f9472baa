"""What of Shoal runs on a Ray cluster from `up` to `down`, wherever its nodes come from."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.named_actor import NamedActor
from cluster.config.sections.cluster import ClusterConfig
from cluster.errors import ShoalError
from cluster.hosts.endpoints import API_PORT, GATEWAY_PORT, Endpoint, choose_endpoint
from cluster.hosts.provider import Beside
from cluster.loopback import own_address
from cluster.ray_private import HEAD_RESOURCE
from cluster.sharing.broker import start_broker
from cluster.sharing.client import BrokerClient
from cluster.state.record import ClusterRecord

END_TIMEOUT_S = 20.0
_LOOK_S = 0.1


def facts_of(cluster: ClusterConfig, record: ClusterRecord) -> dict[str, Any]:
    """What whoever runs inside the cluster asks the broker for."""
    gateway, sharing, parked_gib = cluster.gateway, cluster.sharing, cluster.node.parked_gib
    return {
        "name": record.name,
        "cluster_id": record.cluster_id,
        "provider": record.provider,
        "storage": record.storage,
        "head_ip": record.head_ip,
        "gateway_host": record.gateway_host,
        "gateway_port": record.gateway_port,
        "gateway_url": record.gateway_url,
        "api_host": record.api_host,
        "api_port": record.api_port,
        "serve_host": record.serve_host,
        "serve_port": record.serve_port,
        "gateway_keys": gateway.keys,
        "gateway_count": gateway.count,
        "gateway_front": {
            "kind": gateway.front,
            "certificate": gateway.certificate,
            "private_key": gateway.private_key,
            "node_port": gateway.node_port,
            "address_connections": gateway.address_connections,
            "address_requests": gateway.address_requests,
        }
        if gateway.has_front
        else None,
        "gateway_options": {
            "unknown_fields": gateway.unknown_fields,
            "cors": gateway.cors,
            "token_ports": gateway.token_ports,
            "metrics_from": gateway.metrics_from,
            "keepalive_s": gateway.keepalive_s,
        },
        "dashboard_url": record.dashboard_url,
        "env": dict(record.env),
        # Nodes that Shoal has started itself fit each other; of all others it does not know.
        "probed": record.provider != "embedded",
        "parked_bytes": None if parked_gib is None else int(parked_gib * 2**30),
        "priority": sharing.priority,
        "reclaim_grace_s": sharing.reclaim_grace_s,
        "patience_s": sharing.patience_s,
        "avoid_after": sharing.avoid_after,
        "settle_s": sharing.settle_s,
    }


def start_services(cluster: ClusterConfig, record: ClusterRecord, beside: Beside) -> None:
    """Start them, and wait until they answer; needs a connection to the cluster.

    Args:
        beside: what starts meanwhile.

    Raises:
        ShoalError: one did not start in time.
    """
    facts = facts_of(cluster, record)
    from cluster.hosts.node_keeper import begin_node_keeper

    keeper = begin_node_keeper(record.storage, probed=facts["probed"])
    wait = beside(record)
    start_broker(facts)
    keeper()
    wait()


def broker_facts() -> dict[str, Any] | None:
    """What `up` has told the broker of this Ray cluster; None where it has none."""
    try:
        return BrokerClient().info()
    except ShoalError:
        return None


def choose_endpoints(cluster: ClusterConfig, record: ClusterRecord) -> tuple[Endpoint, Endpoint]:
    """Where the gateway and the control API are to listen: asked of the head, whose addresses they are.

    Raises:
        RequestError: a configured port is taken, or a host is not the head's.
    """
    choose: Any = ray.remote(num_cpus=0, resources={HEAD_RESOURCE: 0.001}, max_retries=0)(_choose_endpoints)
    try:
        gateway, api = ray.get(choose.remote(cluster, record), timeout=END_TIMEOUT_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ShoalError):
            raise error.cause from None
        raise
    return gateway, api


def _choose_endpoints(cluster: ClusterConfig, record: ClusterRecord) -> tuple[Endpoint, Endpoint]:
    own = own_address()  # Serve's proxy listens there, unless whoever starts it says otherwise
    proxy = (own, record.serve_port)
    host = record.head_ip if cluster.gateway.keys else own
    gateway = choose_endpoint("gateway", cluster.gateway, host, GATEWAY_PORT, [proxy])
    return gateway, choose_endpoint("api", cluster.api, own, API_PORT, [proxy, gateway])


def actors() -> list[Mapping[str, str]]:
    """Ray's (name, namespace) of every actor of Shoal's that others find by its name."""
    return [
        each for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE
    ]


def end_services() -> int:
    """End every actor of Shoal's, and wait until none is left; returns how many there were.

    Raises:
        ShoalError: some did not end in time.
    """
    deadline, pause = time.monotonic() + END_TIMEOUT_S, threading.Event()
    seen: set[str] = set()
    while left := actors():
        if time.monotonic() > deadline:
            names = ", ".join(sorted(each["name"] for each in left))
            raise ShoalError(f"these actors did not end within {END_TIMEOUT_S:.0f} s: {names}")
        for each in left:
            seen.add(each["name"])
            NamedActor(each["name"], each["namespace"]).end()
        pause.wait(_LOOK_S)
    return len(seen)
