"""The section `kubernetes`: names as Kubernetes takes them, and nothing that contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.loader import load_config
from tests.cluster.config.config_files import mistakes, write

CLUSTER = "cluster: {%s, kubernetes: {image: 'shoal:1', storage_claim: data%s}}\n"
FIT = "name: lab, provider: kubernetes, storage: /data, nodes: [{name: head, cpus: 0}, {name: gpu, count: 2}]"


def test_what_fits_is_taken(tmp_path: Path) -> None:
    more = ", pod: {hostNetwork: true}, tolerations: [{operator: Exists}], node_selector: {a/b: c}"
    assert load_config(write(tmp_path, CLUSTER % (FIT, more))).config.cluster.node_count == 3


@pytest.mark.parametrize(
    ("more", "path", "words"),
    [
        (", namespace: Ml", "namespace", "should be a name of Kubernetes'"),
        (", memory: lots", "memory", "should be an amount as Kubernetes writes it"),
        (", node_selector: {'a b': c}", "node_selector", "the key of a label"),
        (", tolerations: [{key: a}]", "tolerations.0", "needs `key` and `value`, or `operator: Exists`"),
        (", tolerations: [{operator: Exists, value: b}]", "tolerations.0.value", "has no `value`"),
        (", store: {backend: redis}", "store.address", "has to say where Redis is"),
        (", store: {backend: rocksdb, address: 'r:1'}", "store.address", "is not for `backend: rocksdb`"),
        (", store: {backend: redis, address: 'r:1', size: 1Gi}", "store.size", "is not for `backend: redis`"),
        (", store: {backend: rocksdb, size: 1Gi, claim: c}", "store.size", "and not with `claim`"),
        (", autoscaler: {most: {head: 2}}", "autoscaler.most.head", "is no kind of node but the head"),
        (", autoscaler: {most: {gpu: 1}}", "autoscaler.most.gpu", "at least the count of gpu, 2"),
        (", pod: {containers: []}", "pod.containers", "is said by Shoal itself"),
        (", container: {image: x}", "container.image", "is said by Shoal itself"),
    ],
)
def test_what_kubernetes_would_not_take(more: str, path: str, words: str, tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, CLUSTER % (FIT, more))
    assert found.path.startswith(f"cluster.kubernetes.{path}")
    assert words in found.message


@pytest.mark.parametrize(
    ("cluster", "path", "words"),
    [
        (FIT.replace("lab", "lab.1"), "cluster.name", "should be lower-case letters, digits and `-`"),
        (FIT.replace("lab", "l" * 54), "cluster.name", "at most 53"),
        (FIT.replace("name: gpu", "name: gpu_1"), "cluster.nodes.1.name", "should be lower-case letters"),
        (FIT.replace("cpus: 0", "cpus: 0, count: 2"), "cluster.nodes.0.count", "the first node is the head"),
        (FIT.replace("count: 2", "accelerator: an A"), "cluster.nodes.1.accelerator", "value of a label"),
        (FIT.replace("count: 2", "host: x"), "cluster.nodes.1.host", "is for `provider: ssh`"),
        (FIT.replace("/data", "'s3://b/x'"), "cluster.kubernetes.storage_claim", "a storage that is a path"),
        (FIT.replace("/data", "./data"), "cluster.storage", "should be a path from the root"),
        (FIT.replace("/data", "/"), "cluster.storage", "cannot be the root of a pod's files"),
        (FIT.replace("kubernetes", "embedded"), "cluster.kubernetes", "is for `provider: kubernetes`"),
    ],
)
def test_what_does_not_go_with_pods(cluster: str, path: str, words: str, tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, CLUSTER % (cluster, ""))
    assert found.path == path
    assert words in found.message


@pytest.mark.parametrize(
    ("cluster", "path", "words"),
    [
        ("storage: 's3://b/x'", "cluster.kubernetes.image", "has to name an image with this very Shoal"),
        ("storage: /d, kubernetes: {image: a}", "cluster.storage", "kubernetes.storage_claim has to say"),
    ],
)
def test_what_is_missing_is_named(cluster: str, path: str, words: str, tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, f"cluster: {{name: lab, provider: kubernetes, {cluster}}}\n")
    assert found.path == path
    assert words in found.message


def test_a_variable_is_told_how_variables_are_called(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, "cluster: {env: {1A: x}}\n")
    assert found.path == "cluster.env.1A"
    assert found.message == (
        'should be the name of an environment variable, of letters, digits and `_`, was "1A"'
    )
