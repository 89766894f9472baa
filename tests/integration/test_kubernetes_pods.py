"""The whole way through Shoal in pods of a rendered manifest, each a host of its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import yaml

from cluster.config.loader import load_config
from cluster.hosts.kubernetes.manifests import as_yaml, manifests
from tests import waiting
from tests.kubernetes_pods import Pods, pods_of
from tests.lans import needs_hosts
from tests.ssh_hosts import HEALTH

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 200.0
wait_for = partial(waiting.wait_for, timeout_s=WAIT_S)
CLUSTER = {
    "name": "lab",
    "provider": "kubernetes",
    "nodes": [
        {"name": "head", "cpus": 0},
        {"name": "small", "cpus": 2},
        {"name": "large", "cpus": 3, "accelerator": "none-at-all"},
    ],
    "storage": "/data/lab",
    "env": HEALTH,
    "kubernetes": {"image": "shoal:1", "namespace": "ml", "storage_claim": "data", "notice_s": 60},
}


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    directory = tmp_path_factory.mktemp("pods")
    share = directory / "share"
    share.mkdir()
    share.chmod(0o777)
    file = directory / "shoal.yaml"
    file.write_text(yaml.safe_dump({"cluster": CLUSTER}))
    cluster = load_config(file).resolved.cluster
    environment = {key: str(value) for key, value in cluster.env.items()}
    objects = list(yaml.safe_load_all(as_yaml(manifests(cluster, "0" * 64, environment))))
    lab = directory / "lab"
    lab.mkdir()
    with pods_of(objects, lab, {"data": share}) as pods:
        for pod in pods.pods:
            pods.start(pod)
        print(f"{len(pods.pods)} pods are nodes after {pods.until_ready(len(pods.pods)):.1f} s")
        yield pods


def test_nodes_are_what_the_manifest_says(pods: Pods) -> None:
    nodes = {node["name"]: node for node in pods.document("status")["nodes"]}
    assert {name: node["resources"].get("CPU", 0) for name, node in nodes.items()} == {
        "lab-head": 0,
        "lab-small-worker-0": 2,
        "lab-large-worker-0": 3,
    }


def test_the_whole_way(pods: Pods) -> None:
    report = pods.document("quickstart", "--as", "lab", "--keep", timeout_s=600)
    for step in report["steps"]:
        print(f"{step['name']}: {step['seconds']:.1f} s: {step['detail']}")
    assert report["ok"]
    assert "steps lost, none of" in report["steps"][-1]["detail"]
