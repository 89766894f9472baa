"""The manifests of random configs, each as the API server of Kubernetes takes or refuses it."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config.loader import load_config
from cluster.config.sections.cluster import ClusterConfig
from cluster.hosts.kubernetes.manifests import SILENCE, manifests, merged, ray_cluster
from cluster.hosts.settings import STARTS_AT_ONCE
from tests.cluster.hosts.kubernetes.crd import refusals

NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,12}[a-z0-9])?", fullmatch=True)
KEYS = st.from_regex(r"([a-z]{1,8}\.io/)?[a-zA-Z0-9]{1,12}", fullmatch=True)
VALUES = st.from_regex(r"([a-zA-Z0-9]([a-zA-Z0-9_.-]{0,10}[a-zA-Z0-9])?)?", fullmatch=True)
AMOUNTS = st.sampled_from(["500Mi", "16Gi", "1.5Gi", "64G"])
# Of these Kubernetes' own schemas are checked; the operator of Prometheus has one of its own.
OF_KUBERNETES = ("Secret", "Service", "PodDisruptionBudget")


def some(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | of


@st.composite
def tolerations(draw: st.DrawFn) -> dict[str, Any]:
    made = {"effect": draw(some(st.sampled_from(["NoSchedule", "PreferNoSchedule", "NoExecute"])))}
    made["seconds"] = draw(some(st.integers(0, 10_000)))
    if draw(st.booleans()):
        return {**made, "operator": "Exists", "key": draw(some(KEYS))}
    return {**made, "key": draw(KEYS), "value": draw(VALUES)}


STORES = some(
    st.fixed_dictionaries(
        {"backend": st.just("redis"), "address": st.just("redis.data:6379")},
        optional={"password_secret": NAMES},
    )
    | st.fixed_dictionaries({"backend": st.just("rocksdb")}, optional={"size": AMOUNTS})
    | st.fixed_dictionaries({"backend": st.just("rocksdb")}, optional={"claim": NAMES})
)
PODS = st.sampled_from(
    [
        {},
        {"priorityClassName": "high", "hostNetwork": True},
        {"securityContext": {"fsGroup": 1000}, "volumes": [{"name": "scratch", "emptyDir": {}}]},
        {"initContainers": [{"name": "wait", "image": "busybox", "command": ["true"]}]},
        {"affinity": {"nodeAffinity": {}}, "nodeSelector": {"zone": "a"}},
    ]
)
CONTAINERS = st.sampled_from(
    [
        {},
        {"securityContext": {"runAsNonRoot": True}, "imagePullPolicy": "Always"},
        {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}], "resources": {"limits": {"rdma/ib": "1"}}},
        {"volumeMounts": [{"name": "scratch", "mountPath": "/scratch", "readOnly": False}]},
    ]
)


GATEWAYS = st.sampled_from(
    [
        {},
        {"count": "all", "keys": "/keys.yaml"},
        {"count": 3},
        {"front": "none"},
        {"count": "all", "node_port": 9000, "keys": "/keys.yaml"},
    ]
)


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """The section `cluster` of a config without mistakes."""
    kinds = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    nodes = [
        {
            "name": name,
            "count": 1 if place == 0 else draw(st.integers(1, 20)),
            "cpus": draw(st.integers(0, 256)),
            "gpus": draw(st.sampled_from([0, 0, 1, 8])),
            "accelerator": draw(some(st.sampled_from(["H100-SXM", "A100"]))),
        }
        for place, name in enumerate(kinds)
    ]
    # Where there are several of a kind they have other names: two kinds may not end up with one.
    claim = draw(some(NAMES))
    store = draw(STORES)
    most = {
        str(node["name"]): int(node["count"]) + draw(st.integers(0, 50))
        for node in nodes[1:]
        if draw(st.booleans())
    }
    autoscaler = {"most": most, "idle_s": draw(st.integers(0, 3600))}
    asked = {
        "namespace": draw(NAMES),
        "image": draw(st.sampled_from(["shoal:1", "registry.example.org:5000/ml/shoal@sha256:abc0"])),
        "pull_secrets": draw(st.lists(NAMES, max_size=2, unique=True)),
        "service_account": draw(some(NAMES)),
        "storage_claim": claim,
        "memory": draw(some(AMOUNTS)),
        "node_selector": draw(st.dictionaries(KEYS, VALUES, max_size=3)),
        "tolerations": draw(st.lists(tolerations(), max_size=3)),
        "store": store,
        "autoscaler": draw(some(st.just(autoscaler))),
        "network_policy": draw(st.booleans()),
        "monitor": draw(st.booleans()),
        "notice_s": draw(st.integers(10, 3600)),
        "pod": draw(PODS),
        "container": draw(CONTAINERS),
    }
    return {
        "name": draw(NAMES),
        "provider": "kubernetes",
        "nodes": nodes,
        "storage": "s3://bucket/shoal" if claim is None else "/data/shoal",
        "gateway": draw(GATEWAYS),
        "env": draw(st.dictionaries(st.sampled_from(["HF_HOME", "A_1"]), st.just("x"), max_size=2)),
        "kubernetes": {key: value for key, value in asked.items() if value is not None},
    }


def made(section: dict[str, Any], directory: Path) -> tuple[ClusterConfig, list[dict[str, Any]]]:
    """The section as Shoal reads it, which finds no mistake, and its manifests."""
    file = directory / "shoal.yaml"
    file.write_text(yaml.safe_dump({"cluster": section}))
    cluster = load_config(file).resolved.cluster
    found = manifests(cluster, "the-token-of-ray", {key: str(value) for key, value in cluster.env.items()})
    # As kubectl reads it.
    return cluster, list(yaml.safe_load_all(yaml.safe_dump_all(found)))


def _names_are_several(section: dict[str, Any]) -> bool:
    """Whether no two nodes get one name, as `a-2` and the second of `a` would."""
    names = [
        name
        for node in section["nodes"]
        for name in ([node["name"]] if node["count"] == 1 else [f"{node['name']}-{n}" for n in range(1, 21)])
    ]
    return len(names) == len(set(names))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples."""
    return tmp_path_factory.mktemp("manifests")


RANDOM = clusters().filter(_names_are_several)
FEW, MANY = (
    settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))
    for number in (30, 300)
)


@FEW
@given(section=RANDOM)
def test_the_api_server_takes_the_manifests_of_some_configs(section: dict[str, Any], directory: Path) -> None:
    _see_them_taken(section, directory)


@pytest.mark.slow
@MANY
@given(section=RANDOM)
def test_the_api_server_takes_the_manifests_of_300_configs(section: dict[str, Any], directory: Path) -> None:
    _see_them_taken(section, directory)


def _see_them_taken(section: dict[str, Any], directory: Path) -> None:
    cluster, found = made(section, directory)
    *others, ray = found
    assert refusals(ray) == []
    assert refusals(ray, ray) == [], "applied again"
    for each in others:
        if each["kind"] in OF_KUBERNETES:
            kubernetes_validate.validate(each, "1.33", strict=True)
    assert {each["metadata"]["namespace"] for each in found} == {cluster.kubernetes.namespace}
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(names) == len(set(names))
    groups = [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    for pod in pods:
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        there = {volume["name"] for volume in pod["volumes"]}
        assert mounted - {"scratch"} <= there


CLUSTER: dict[str, Any] = {
    "name": "lab",
    "provider": "kubernetes",
    "nodes": [{"name": "head", "cpus": 0}, {"name": "gpu", "count": 2, "cpus": 8, "gpus": 8}],
    "storage": "/data/shoal",
    "env": {"TOKEN": "very secret"},
    "kubernetes": {"image": "shoal:1", "storage_claim": "data", "namespace": "ml"},
}


def with_gateway(directory: Path, **gateway: Any) -> dict[str, dict[str, Any]]:
    """The manifests' specs by name, with a network policy and a monitor."""
    section = changed(network_policy=True, monitor=True) | {"gateway": gateway}
    return {each["metadata"]["name"]: each.get("spec", {}) for each in made(section, directory)[1]}


def open_on(specs: dict[str, dict[str, Any]], role: str) -> set[int]:
    rules = specs["lab"]["networkPolicy"][role]["ingressRules"]
    return {port["port"] for rule in rules for port in rule["ports"]}


def test_one_gateway_is_reached_at_the_head(directory: Path) -> None:
    specs = with_gateway(directory, front="none")
    assert specs["lab-shoal"]["selector"]["ray.io/node-type"] == "head"
    assert "lab-gateways" not in specs
    assert open_on(specs, "head") == {8001, 8270, 8080}
    assert open_on(specs, "worker") == {8080}


def test_gateways_of_all_pods_are_one_service(directory: Path) -> None:
    specs = with_gateway(directory, count="all", front="none", keys="/keys.yaml")
    gateways = specs["lab-gateways"]
    assert gateways["selector"] == {"ray.io/cluster": "lab"}
    assert [(port["port"], port["targetPort"]) for port in gateways["ports"]] == [(8000, 8001)]
    assert "clusterIP" not in gateways
    assert open_on(specs, "worker") == {8080, 8001}


def test_behind_a_front_only_the_operator_of_prometheus_asks_each_gateway(directory: Path) -> None:
    specs = with_gateway(directory, count=3)
    assert "lab-gateways" not in specs
    assert {port["name"]: port["port"] for port in specs["lab-metrics"]["ports"]}["gateways"] == 8100
    assert open_on(specs, "worker") == {8080, 8100}


def changed(**asked: Any) -> dict[str, Any]:
    section = copy.deepcopy(CLUSTER)
    section["kubernetes"] |= asked
    return section


def test_secrets_are_in_secrets_and_nowhere_else(tmp_path: Path) -> None:
    _, found = made(CLUSTER, tmp_path)
    secrets = {each["metadata"]["name"]: each["data"] for each in found if each["kind"] == "Secret"}
    assert secrets.keys() == {"lab-token", "lab-config", "lab-env"}
    assert base64.b64decode(secrets["lab-token"]["auth_token"]) == b"the-token-of-ray"
    assert base64.b64decode(secrets["lab-env"]["TOKEN"]) == b"very secret"
    config = json.loads(base64.b64decode(secrets["lab-config"]["cluster.json"]))
    assert config["storage"] == "/data/shoal"
    assert "env" not in config
    others = json.dumps([each for each in found if each["kind"] != "Secret"])
    assert "very secret" not in others
    assert "the-token-of-ray" not in others


def test_a_node_has_what_its_kind_says(tmp_path: Path) -> None:
    _, found = made(changed(memory="64Gi"), tmp_path)
    spec = found[-1]["spec"]
    head, (gpu,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"}
    assert gpu["rayStartParams"] == {"num-cpus": "8", "num-gpus": "8"}
    assert (gpu["replicas"], gpu["minReplicas"], gpu["maxReplicas"]) == (2, 2, 2)
    (container,) = gpu["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"}
    assert {"name": "shoal-storage", "mountPath": "/data/shoal"} in container["volumeMounts"]
    assert container["envFrom"] == [{"secretRef": {"name": "lab-env"}}]
    # A head that is gone without a word is missed soon.
    assert {"name": SILENCE, "value": "15000"} in container["env"]
    # A head without CPUs would start its processes one after the other.
    (own,) = head["template"]["spec"]["containers"]
    assert {"name": STARTS_AT_ONCE, "value": "4"} in own["env"]
    assert STARTS_AT_ONCE not in {variable["name"] for variable in container["env"]}


def test_only_a_head_whose_store_stays_may_be_evicted(tmp_path: Path) -> None:
    for store, most in ((None, 0), ({"backend": "rocksdb"}, 1)):
        _, found = made(changed(**({} if store is None else {"store": store})), tmp_path)
        (budget,) = [each for each in found if each["metadata"]["name"] == "lab-head"]
        assert budget["spec"]["maxUnavailable"] == most


def test_a_store_cannot_be_changed_while_the_cluster_is_there(tmp_path: Path) -> None:
    """What the rules of KubeRay's say, so that a test of them can fail."""
    _, before = made(changed(store={"backend": "rocksdb"}), tmp_path)
    _, after = made(changed(store={"backend": "redis", "address": "r:6379"}), tmp_path)
    (said,) = refusals(after[-1], before[-1])
    assert said == "$.spec.gcsFaultToleranceOptions.backend: gcsFaultToleranceOptions.backend is immutable"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "headGroupSpec", "template", "spec", "containrs"), []),
        (("spec", "workerGroupSpecs", 0, "maxReplicas"), "many"),
        (("spec", "autoscalerOptions"), {"upscalingMode": "Fast"}),
        (("spec", "managedBy"), "somebody"),
    ],
)
def test_the_api_server_of_the_tests_refuses_too(path: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    cluster, _ = made(CLUSTER, tmp_path)
    manifest = ray_cluster(cluster)
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert refusals(manifest)


def test_fields_are_laid_over_and_lists_put_behind() -> None:
    base = {"a": {"b": [1], "c": 1}, "d": 1}
    assert merged(base, {"a": {"b": [2], "c": 2}, "e": {"f": 1}}) == {
        "a": {"b": [1, 2], "c": 2},
        "d": 1,
        "e": {"f": 1},
    }
    assert base == {"a": {"b": [1], "c": 1}, "d": 1}
