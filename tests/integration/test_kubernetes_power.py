"""Machines below a cluster in pods that lose their power, while a job trains and an app is asked."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.config.reading.api_keys import digest_of
from cluster.config.template import TEMPLATE
from infra.quickstart import adapt
from tests import waiting
from tests.kubernetes_pods import Pod
from tests.kubernetes_site import KubernetesUser, Operator, kubernetes_site, needs_kubectl
from tests.ssh_hosts import HEALTH

pytestmark = [
    needs_kubectl,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

WAIT_S = 200.0
wait_for = partial(waiting.wait_for, timeout_s=WAIT_S)
KEY = "sk-shoal-of-this-test"
KEYS = json.dumps([{"sha256": digest_of(KEY), "tenant": "everybody"}])
REDIS = ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]
CLUSTER = {
    "name": "lab",
    "provider": "kubernetes",
    "nodes": [{"name": "head", "cpus": 0}, {"name": "node", "count": 2, "cpus": 3}],
    "storage": "/data/lab",
    "env": {**HEALTH, "KEYS": None},
    "gateway": {"keys": "env:KEYS"},
    "kubernetes": {
        "image": "shoal:1",
        "namespace": "ml",
        "storage_claim": "data",
        "notice_s": 60,
        "store": {"backend": "redis", "address": "redis:6379"},
    },
}
BODY = {"model": "chat", "prompt": "import os", "max_tokens": 8, "temperature": 0}


class Site:
    """A cluster in pods with an elastic job that trains and an app of one replica."""

    def __init__(self, operator: Operator, user: KubernetesUser, share: Path) -> None:
        self.operator, self.user, self._share = operator, user, share
        self.answers: list[tuple[float, Any]] = []
        self._ended = threading.Event()
        self.job = ""
        self.version = ""
        """Of the model that answered last."""

    def begin(self) -> None:
        """Bring the cluster up, train a model, serve it, and have another job go on."""
        document = yaml.safe_load(adapt(TEMPLATE, "lab", CLUSTER))
        document["serve_apps"]["chat"] |= {"replicas": {"min": 1, "max": 1}, "model": "stdlib-lm@production"}
        document["train_jobs"]["stdlib-lm"] |= {"steps": 20, "evaluate": {"every_steps": None}}
        (self.user.home / "shoal.yaml").write_text(yaml.safe_dump(document))
        began = time.monotonic()
        self._do("up")
        self._do("train", "stdlib-lm")
        (model,) = {row["path"] for row in self.user.document("models")}
        tokenizer = ("--set", f"data.tokenizer={model}")  # saves the time to train another
        self._do("train", "stdlib-lm", *tokenizer)
        self._do("promote", "stdlib-lm@1", "production")
        self._do("serve", "chat")
        print(f"a model is served after {time.monotonic() - began:.1f} s")
        settings = (*tokenizer, "--set", "checkpoint.every_steps=500")
        self.job = self.user.document("train", "elastic-lm", "--detach", *settings)["job"]
        wait_for(lambda: len(self.steps()) > 20, "the job does no steps")
        threading.Thread(target=self._ask, daemon=True).start()
        wait_for(lambda: len(self.said()) > 5, "nobody asks")
        assert set(self.said()) == {200}

    def _do(self, *command: str) -> None:
        done = self.user.shoal(*command, timeout_s=400)
        assert done.returncode == 0, done.stderr

    def end(self) -> None:
        """Nobody asks any more."""
        self._ended.set()

    # -- what is seen of it -----------------------------------------------------------------------------

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A log of the job's run."""
        log = self._share / "jobs" / self.job / f"{name}.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines("metrics")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.lines("events") if event["kind"] == kind]

    def node_of_app(self) -> str:
        """The pod in which the app's replica is."""
        wait_for(lambda: len(self.used_by("serving")) == 1, "the app's former replica stays")
        (node,) = self.used_by("serving")
        return node

    def used_by(self, kind: str) -> set[str]:
        """The pods on which a tenant holds something."""
        status = self.user.document("status")
        names = {node["node_id"]: node["name"] for node in status["nodes"]}
        return {names[node] for row in status["leases"] if row["kind"] == kind for node in row["nodes"]}

    def _ask(self) -> None:
        """Ask the app as whoever is in Kubernetes does: where the Service leads to."""
        while not self._ended.wait(0.2):
            began = time.monotonic()
            pods = self.operator.pods
            if pods is None:
                return
            url = f"http://{pods.head.host.address}:8001/v1/completions"
            try:
                headers = {"Authorization": f"Bearer {KEY}"}
                asked = httpx.post(
                    url, json=BODY, headers=headers, timeout=httpx.Timeout(20, connect=2), trust_env=False
                )
                said: Any = asked.status_code
                self.version = asked.headers.get("x-shoal-model-version", self.version)
            except httpx.HTTPError as error:
                said = type(error).__name__
            self.answers.append((began, said))

    def said(self, since: float = 0.0) -> list[Any]:
        """What came of what was asked since then."""
        return [said for began, said in self.answers if began >= since]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    with kubernetes_site(directory, spare=4, beside={"redis": REDIS}) as (_, operator, user):
        user.environment["KEYS"] = KEYS
        site = Site(operator, user, directory / "share")
        try:
            site.begin()
            yield site
        finally:
            site.end()
            logs = [pod.log for pod in operator.pods.pods] if operator.pods is not None else []
            user.shoal("down")  # and with it what forwards ports to this machine
            for log in logs:
                print(f"== {log.name}\n{log.read_text(errors='replace')[-4000:]}")


def test_planned_changes_lose_no_step_and_no_request(site: Site) -> None:
    """A new version of the model, and a pod that is deleted, with the app's one replica on it."""
    asked, began = time.monotonic(), site.version
    promoted = site.user.shoal("promote", "stdlib-lm@2", "production")
    assert promoted.returncode == 0, promoted.stderr
    waited = wait_for(lambda: site.version != began, "the app does not change to the new version")
    print(f"the new version answered {waited:.1f} s after it was promoted")
    pod = site.operator.pod(site.node_of_app())
    deleted = time.monotonic()
    assert pod.delete() == 0
    print(f"{pod.name} left within {time.monotonic() - deleted:.1f} s")
    made = site.operator.replace(pod)
    waited = wait_for(lambda: used(site, made), "the new pod is not used")
    print(f"{made.name} is used {waited:.1f} s after its container was started")
    done = len(site.steps())
    wait_for(lambda: len(site.steps()) > done + 20, "the job does not go on")
    assert set(site.said(asked)) == {200}, "a request was lost"
    logged = site.steps()
    assert logged == list(range(1, len(logged) + 1)), "a step was lost, or done twice"
    print(f"none of {len(logged)} steps lost, none of {len(site.said(asked))} requests")


def test_a_worker_pods_machine_loses_its_power(site: Site) -> None:
    assert site.operator.pods is not None
    name = site.node_of_app()
    pod = site.operator.pod(name)
    cut = time.monotonic()
    done = len(site.steps())
    pod.host.cut_power()
    back_s = wait_for(lambda: 200 in site.said(cut + 0.1), "the app does not answer again")
    print(f"{name} lost its power: the app answered again after {back_s:.1f} s")
    wait_for(lambda: len(site.steps()) > done + 20, "the job does not go on")
    print(f"{name} lost its power: twenty steps more after {time.monotonic() - cut:.1f} s")
    given_up = time.monotonic()
    made = site.operator.replace(pod)
    assert (made.name, made.host.address) != (pod.name, pod.host.address)
    wait_for(lambda: used(site, made), "the new pod is not used")
    print(f"{made.name} is used {time.monotonic() - given_up:.1f} s after it was made")
    asked = time.monotonic()
    wait_for(lambda: len(site.said(asked)) > 10, "nobody asks any more")
    assert set(site.said(asked)) == {200}


def test_the_head_pods_machine_loses_its_power(site: Site) -> None:
    """With it go the job's driver, the broker, Serve's controller and the front; Ray's store is elsewhere."""
    assert site.operator.pods is not None
    head = site.operator.pods.head
    attempt = site.lines("metrics")[-1]["attempt"]
    cut = time.monotonic()
    head.host.cut_power()
    made = site.operator.replace(head)
    assert made.host.address != head.host.address
    back_s = wait_for(lambda: 200 in site.said(cut + 0.1), "the app does not answer again")
    print(f"the head lost its power: the app answered again after {back_s:.1f} s")
    back_s += wait_for(lambda: site.lines("metrics")[-1]["attempt"] > attempt, "the job does not go on")
    print(f"the head lost its power: the job did a step again after {back_s:.1f} s")
    (job,) = [row for row in site.user.document("jobs") if row["job"] == site.job]
    assert job["status"] == "running"
    (app,) = site.user.document("status")["apps"]
    assert app["name"] == "chat"
    asked = time.monotonic()
    wait_for(lambda: len(site.said(asked)) > 10, "nobody asks any more")
    assert set(site.said(asked)) == {200}


def used(site: Site, pod: Pod) -> bool:
    """Whether a job or an app holds something there."""
    return pod.name in site.used_by("training") | site.used_by("serving")
