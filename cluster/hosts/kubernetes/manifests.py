"""The objects of Kubernetes that make a cluster: KubeRay's RayCluster, and what belongs to it. Pure."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version as version_of
from typing import Any

from cluster.config.sections.cluster import ClusterConfig, NodeConfig
from cluster.hosts.endpoints import API_PORT, DASHBOARD_PORT, GATEWAY_PORT
from cluster.hosts.on_host.host_ports import GCS_PORT
from cluster.hosts.settings import LEAST_AT_ONCE, STARTS_AT_ONCE
from cluster.models.directory_here import is_uri
from cluster.state.nodes import ACCELERATOR_LABEL, KIND_LABEL

KubeObject = dict[str, Any]

CONFIG_PLACE = "/etc/shoal"
"""Where pods find the cluster's section of the config."""
CONFIG_KEY = "cluster.json"
TOKEN_KEY = "auth_token"
"""KubeRay looks for Ray's token under this key."""
ADDRESS = "SHOAL_POD_IP"
"""Names the pod's own address."""
SILENCE = "RAY_grpc_client_keepalive_timeout_ms"
HEAD_SILENT_S = 15
"""So long after a head's machine has lost its power the others take their connections to it for dead, and
look where it is now. Ray's own default is two minutes."""
CLIENT_PORT, METRICS_PORT = 10001, 8080
"""Ray's and KubeRay's usual ones."""
POD_GATEWAY_PORT = 8001
"""Ray Serve's own proxy has the usual one in the head's pod."""
NODE_GATEWAY_PORT = 8100
"""Of each gateway behind a front."""
PROGRAM = ("python", "-m", "infra.kubernetes_pod")
"""What runs in the container of a pod: it starts Ray, and has all leave when the pod has to."""
_OVERWRITE = "ray.io/overwrite-container-cmd"
_CLUSTER, _NODE_TYPE = "ray.io/cluster", "ray.io/node-type"


def manifests(cluster: ClusterConfig, token: str, environment: Mapping[str, str]) -> list[KubeObject]:
    """All of them, in the order in which they are made.

    Args:
        cluster: its section of the config, paths resolved, without mistakes.
        token: Ray's.
        environment: `cluster.env` with the values of the caller.
    """
    found = [
        _secret(cluster, "token", {TOKEN_KEY: token}),
        _secret(cluster, "config", {CONFIG_KEY: json.dumps(_section_for_pods(cluster), indent=2)}),
    ]
    if environment:
        found.append(_secret(cluster, "env", environment))
    servers = {"gateway": (GATEWAY_PORT, POD_GATEWAY_PORT), "api": (API_PORT, API_PORT)}
    found.append(_service(cluster, "shoal", servers))
    found += [_budget(cluster, "head"), _budget(cluster, "worker")]
    if cluster.gateway.count == "all" and not cluster.gateway.has_front:
        everywhere = {"gateway": (GATEWAY_PORT, POD_GATEWAY_PORT)}
        found.append(_service(cluster, "gateways", everywhere, head_only=False))
    if cluster.kubernetes.monitor:
        metrics = {"metrics": (METRICS_PORT, METRICS_PORT)}
        if cluster.gateway.has_front:
            port = node_gateway_port(cluster)
            metrics["gateways"] = port, port
        found.append(_service(cluster, "metrics", metrics, head_only=False, of_each_pod=True))
        found.append(_service_monitor(cluster))
    return [*found, ray_cluster(cluster, has_environment=bool(environment))]


def ray_cluster(cluster: ClusterConfig, *, has_environment: bool = False) -> KubeObject:
    """KubeRay's RayCluster."""
    asked = cluster.kubernetes
    head, *workers = cluster.nodes
    spec: KubeObject = {
        "rayVersion": version_of("ray"),
        "authOptions": {"mode": "token", "secretName": f"{cluster.name}-token"},
        "headGroupSpec": {
            "rayStartParams": {**_start(head), "dashboard-host": "0.0.0.0"},
            "template": _pod(cluster, head, has_environment=has_environment, is_head=True),
            **_labels(head),
        },
        "workerGroupSpecs": [
            {
                "groupName": kind.name,
                "replicas": kind.count,
                "minReplicas": kind.count,
                "maxReplicas": _most(cluster, kind),
                "rayStartParams": _start(kind),
                "template": _pod(cluster, kind, has_environment=has_environment, is_head=False),
                **_labels(kind),
            }
            for kind in workers
        ],
    }
    if asked.store is not None:
        spec["gcsFaultToleranceOptions"] = _store(cluster)
    if asked.autoscaler is not None:
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {
            "version": "v2",
            "upscalingMode": asked.autoscaler.upscaling,
            "idleTimeoutSeconds": asked.autoscaler.idle_s,
        }
    if asked.network_policy:
        spec["networkPolicy"] = _network_policy(cluster)
    made = _object(cluster, "ray.io/v1", "RayCluster", cluster.name, {"spec": spec})
    made["metadata"]["annotations"] = {_OVERWRITE: "true"}
    return made


def node_gateway_port(cluster: ClusterConfig) -> int:
    """Where each gateway listens behind a front."""
    return cluster.gateway.node_port or NODE_GATEWAY_PORT


def as_yaml(objects: Sequence[KubeObject]) -> str:
    """Objects as kubectl takes them: YAML documents, one after the other."""
    from ruamel.yaml import YAML

    text, writer = io.StringIO(), YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.dump_all(objects, text)
    return text.getvalue()


# -- pods ---------------------------------------------------------------------------------------------------


def _pod(cluster: ClusterConfig, kind: NodeConfig, *, has_environment: bool, is_head: bool) -> KubeObject:
    asked = cluster.kubernetes
    mounts = [{"name": "shoal-config", "mountPath": CONFIG_PLACE, "readOnly": True}]
    volumes: list[KubeObject] = [{"name": "shoal-config", "secret": {"secretName": f"{cluster.name}-config"}}]
    if asked.storage_claim is not None and not is_uri(cluster.storage):
        mounts.append({"name": "shoal-storage", "mountPath": cluster.storage})
        claim = {"claimName": asked.storage_claim}
        volumes.append({"name": "shoal-storage", "persistentVolumeClaim": claim})
    ports = {"gcs": GCS_PORT, "dashboard": DASHBOARD_PORT, "client": CLIENT_PORT} if is_head else {}
    ports |= {"gateway": POD_GATEWAY_PORT, "api": API_PORT} if is_head else {}
    if cluster.gateway.has_front:
        ports["gateways"] = node_gateway_port(cluster)
    elif cluster.gateway.count == "all":
        ports["gateway"] = POD_GATEWAY_PORT
    container: KubeObject = {
        "name": "ray-head" if is_head else "ray-worker",
        "image": asked.image,
        "command": list(PROGRAM),
        "args": ["head" if is_head else "worker"],
        "resources": _resources(cluster, kind),
        "env": [
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": SILENCE, "value": f"{1000 * HEAD_SILENT_S}"},
            *([{"name": STARTS_AT_ONCE, "value": f"{LEAST_AT_ONCE}"}] if is_head else []),
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "volumeMounts": mounts,
    }
    if has_environment:
        container["envFrom"] = [{"secretRef": {"name": f"{cluster.name}-env"}}]
    spec: KubeObject = {
        "terminationGracePeriodSeconds": asked.notice_s,
        "containers": [merged(container, asked.container)],
        "volumes": volumes,
    }
    if asked.service_account is not None:
        spec["serviceAccountName"] = asked.service_account
    if asked.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in asked.pull_secrets]
    if asked.node_selector:
        spec["nodeSelector"] = dict(asked.node_selector)
    if asked.tolerations:
        spec["tolerations"] = [
            {
                key: value
                for key, value in {
                    "key": each.key,
                    "operator": each.operator,
                    "value": each.value,
                    "effect": each.effect,
                    "tolerationSeconds": each.seconds,
                }.items()
                if value is not None
            }
            for each in asked.tolerations
        ]
    return {"metadata": {"labels": _of_cluster(cluster)}, "spec": merged(spec, asked.pod)}


def _resources(cluster: ClusterConfig, kind: NodeConfig) -> KubeObject:
    # A head that lends no CPUs needs some for itself.
    wanted: KubeObject = {"cpu": str(kind.cpus or 1)}
    if cluster.kubernetes.memory is not None:
        wanted["memory"] = cluster.kubernetes.memory
    if kind.gpus:
        wanted[cluster.kubernetes.gpu_resource] = str(kind.gpus)
    return {"requests": wanted, "limits": dict(wanted)}


def _start(kind: NodeConfig) -> dict[str, str]:
    return {"num-cpus": str(kind.cpus), "num-gpus": str(kind.gpus)}


def _labels(kind: NodeConfig) -> KubeObject:
    """Those of Ray's nodes, which the autoscaler knows before there is one."""
    labels = {KIND_LABEL: kind.name}
    return {"labels": labels if kind.accelerator is None else {**labels, ACCELERATOR_LABEL: kind.accelerator}}


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> KubeObject:
    """One with the fields of the other laid over it; lists are put behind one another."""
    result = dict(base)
    for key, value in more.items():
        there = result.get(key)
        if isinstance(there, Mapping) and isinstance(value, Mapping):
            result[key] = merged(there, value)
        elif isinstance(there, list) and isinstance(value, list):
            result[key] = [*there, *value]
        else:
            result[key] = value
    return result


# -- options of KubeRay's -----------------------------------------------------------------------------------


def _most(cluster: ClusterConfig, kind: NodeConfig) -> int:
    autoscaler = cluster.kubernetes.autoscaler
    return kind.count if autoscaler is None else autoscaler.most.get(kind.name, kind.count)


def _store(cluster: ClusterConfig) -> KubeObject:
    store = cluster.kubernetes.store
    assert store is not None, "it is asked for"
    if store.backend == "redis":
        found: KubeObject = {"backend": "redis", "redisAddress": store.address}
        if store.password_secret is not None:
            key = {"name": store.password_secret, "key": "password"}
            found["redisPassword"] = {"valueFrom": {"secretKeyRef": key}}
        return found
    volume: KubeObject = {}
    if store.claim is not None:
        volume["claimName"] = store.claim
    if store.size is not None:
        volume["size"] = store.size
    return {"backend": "rocksdb", **({"storage": volume} if volume else {})}


def _network_policy(cluster: ClusterConfig) -> KubeObject:
    """Others than the cluster's own pods, which KubeRay lets through, reach what is asked by others."""

    def open_ports(*ports: int) -> KubeObject:
        return {"ingressRules": [{"ports": [{"protocol": "TCP", "port": port} for port in ports]}]}

    gateway, on_all = cluster.gateway, list[int]()
    if cluster.kubernetes.monitor:
        on_all += [METRICS_PORT, *([node_gateway_port(cluster)] if gateway.has_front else [])]
    on_workers = [*on_all, *([POD_GATEWAY_PORT] if gateway.count == "all" and not gateway.has_front else [])]
    policy: KubeObject = {
        "mode": "DenyAllIngress",
        "head": open_ports(POD_GATEWAY_PORT, API_PORT, *on_all),
    }
    return {**policy, "worker": open_ports(*on_workers)} if on_workers else policy


# -- what belongs to it -------------------------------------------------------------------------------------


def _section_for_pods(cluster: ClusterConfig) -> KubeObject:
    """The section without what only the caller needs: secrets, and how pods are made."""
    section = cluster.model_dump(mode="json", exclude_unset=True)
    return {key: value for key, value in section.items() if key not in ("env", "ssh", "slurm")}


def _of_cluster(cluster: ClusterConfig) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "shoal", "app.kubernetes.io/part-of": cluster.name}


def _object(
    cluster: ClusterConfig, api_version: str, kind: str, name: str, content: Mapping[str, Any]
) -> KubeObject:
    metadata = {"name": name, "namespace": cluster.kubernetes.namespace, "labels": _of_cluster(cluster)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def _secret(cluster: ClusterConfig, what: str, content: Mapping[str, str]) -> KubeObject:
    data = {key: base64.b64encode(value.encode()).decode() for key, value in content.items()}
    return _object(cluster, "v1", "Secret", f"{cluster.name}-{what}", {"type": "Opaque", "data": data})


def _service(
    cluster: ClusterConfig,
    what: str,
    ports: Mapping[str, tuple[int, int]],
    *,
    head_only: bool = True,
    of_each_pod: bool = False,
) -> KubeObject:
    """A Service; `ports` are its own and those of the pods."""
    selector = {_CLUSTER: cluster.name, **({_NODE_TYPE: "head"} if head_only else {})}
    spec: KubeObject = {
        "selector": selector,
        "ports": [{"name": name, "port": own, "targetPort": of_pod} for name, (own, of_pod) in ports.items()],
    }
    if of_each_pod:
        spec["clusterIP"] = "None"
    return _object(cluster, "v1", "Service", f"{cluster.name}-{what}", {"spec": spec})


def _budget(cluster: ClusterConfig, role: str) -> KubeObject:
    """How many pods may be evicted at once: the head takes the cluster with it, unless its store stays."""
    most = 0 if role == "head" and cluster.kubernetes.store is None else 1
    selector = {"matchLabels": {_CLUSTER: cluster.name, _NODE_TYPE: role}}
    spec = {"maxUnavailable": most, "selector": selector}
    return _object(cluster, "policy/v1", "PodDisruptionBudget", f"{cluster.name}-{role}", {"spec": spec})


def _service_monitor(cluster: ClusterConfig) -> KubeObject:
    # Behind a front each gateway is asked for its own figures.
    gateways = "gateways" if cluster.gateway.has_front else "gateway"
    spec = {
        "selector": {"matchLabels": {"app.kubernetes.io/part-of": cluster.name}},
        "endpoints": [{"port": "metrics"}, {"port": gateways, "path": "/metrics"}],
    }
    return _object(cluster, "monitoring.coreos.com/v1", "ServiceMonitor", cluster.name, {"spec": spec})
