"""A cluster in pods: the real kubectl asks an API server, whose operator makes pods on hosts of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.hosts.kubernetes.port_forward import KubernetesCluster
from cluster.state.state_directory import require_private, state_directory
from tests.api_server import ApiServer, Object
from tests.kubernetes_site import KubernetesUser, Operator, kubernetes_site, needs_kubectl

pytestmark = [needs_kubectl, pytest.mark.timeout(400)]

HELLO = 'import socket\nprint("hello from", socket.gethostname(), open("words.txt").read())\n'
JOB = {"task": "script", "script": "hello.py", "workers": {"min": 1, "max": 1}}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[ApiServer, Operator, KubernetesUser]]:
    with kubernetes_site(tmp_path) as site:
        yield site


Site = tuple[ApiServer, Operator, KubernetesUser]


def refusal(user: KubernetesUser) -> str:
    """What `up` says when it does not work; nothing is left of it here."""
    done = user.shoal("up")
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    assert not (user.home / "state/shoal/lab").exists()
    return done.stderr


def test_what_kubernetes_refuses_is_told_in_its_words(site: Site) -> None:
    server, operator, user = site
    operator.works = False
    user.write()
    server.forbidden = {("create", "rayclusters")}
    said = refusal(user)
    assert 'rayclusters is forbidden: User "ann" cannot create resource "rayclusters"' in said
    assert not [key for key in server.objects if key[0] in ("secrets", "services", "rayclusters")]
    server.forbidden = set()
    server.take("customresourcedefinitions", "", "rayclusters.ray.io")
    assert (
        refusal(user)
        .strip()
        .endswith(
            "this Kubernetes cluster knows no rayclusters.ray.io: KubeRay's operator is not installed there"
        )
    )
    user.write({"kubernetes": {"image": "shoal:1", "storage_claim": "data", "context": "elsewhere"}})
    assert 'context "elsewhere" does not exist' in refusal(user)
    user.environment["PATH"] = "/nowhere"
    assert "there is no `kubectl` here, which `provider: kubernetes` needs" in refusal(user)


def test_jobs_and_apps_that_are_not_ended_since_there_is_no_head_are_told_to_come_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, operator, user = site
    operator.works = False
    file = user.write()
    monkeypatch.setenv("XDG_STATE_HOME", user.environment["XDG_STATE_HOME"])
    require_private(state_directory("lab"))
    KubernetesCluster("lab", str(file), "ml", None).write()  # as of an `up` that was killed
    done = user.shoal("down")
    assert done.returncode == 0, done.stderr
    said = "jobs and apps are not ended first, so the next `shoal up` goes on with them: no head is ready"
    assert said in done.stderr.splitlines()
    assert not (user.home / "state/shoal/lab").exists()


@pytest.mark.slow
def test_an_image_that_cannot_be_pulled_ends_it_and_a_quota_is_waited_for(site: Site) -> None:
    server, operator, user = site
    operator.works = False
    user.write()
    quota = 'pods "lab-head" is forbidden: exceeded quota: cpus'
    about = {"name": "lab", "kind": "RayCluster"}

    def make(what: str, plural: str, value: Object) -> None:
        if (what, plural) != ("made", "rayclusters"):
            return
        event = {"type": "Warning", "reason": "FailedToCreateHeadPod", "message": quota}
        metadata = {"name": "lab.1", "namespace": "ml"}
        server.put("events", {**event, "metadata": metadata, "involvedObject": about})
        state = {"waiting": {"reason": "ErrImagePull", "message": "no such host"}}
        labels = {"ray.io/cluster": "lab", "ray.io/node-type": "worker"}
        metadata = {"name": "lab-node-1", "namespace": "ml", "labels": labels}
        status = {"containerStatuses": [{"image": "shoal:1", "state": state}]}
        server.put("pods", {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "status": status})

    server.on_change = make
    said = refusal(user).splitlines()
    assert quota in said
    problem = "lab-node-1: its image shoal:1 cannot be pulled (ErrImagePull): no such host"
    assert said.count(problem) == 2, "it is told when it is seen, and again as what ends it"
    assert not [key for key in server.objects if key[0] in ("secrets", "services", "rayclusters")]


@pytest.mark.slow
def test_a_cluster_in_pods_from_up_to_down(site: Site) -> None:
    server, operator, user = site
    user.write(train_jobs={"hello": JOB})
    (user.home / "hello.py").write_text(HELLO)
    (user.home / "words.txt").write_text("from this machine")
    began = time.monotonic()
    first = user.shoal("up", "--json")
    print(f"up after {time.monotonic() - began:.1f} s")
    assert first.returncode == 0, first.stderr
    assert "already" not in first.stderr
    up = json.loads(first.stdout)
    assert sorted(node["name"] for node in up["nodes"]) == [
        "lab-head",
        "lab-node-worker-0",
        "lab-node-worker-1",
    ]
    began = time.monotonic()
    assert len(user.document("status")["nodes"]) == 3
    print(f"status after {time.monotonic() - began:.2f} s")
    done = user.shoal("train", "hello")
    assert done.returncode == 0, done.stderr
    assert "hello from lab-node-worker-" in done.stdout + done.stderr
    again = user.shoal("up")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("is up already") == 1
    asked = [words for _, words in operator.executed if words[:2] == ["python", "-c"]]
    assert len(asked) == 2, "each `up` asks once where the config is"
    began = time.monotonic()
    assert user.document("down") == {"name": "lab", "stopped": True}
    print(f"down after {time.monotonic() - began:.1f} s")
    kinds = {plural for plural, _, _ in server.objects}
    assert kinds == {"customresourcedefinitions", "namespaces"}
    assert operator.pods is None
    assert not (user.home / "state/shoal/lab").exists()
