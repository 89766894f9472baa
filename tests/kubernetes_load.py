"""A cluster in pods with an elastic job that trains and an app that is asked."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.config.reading.api_keys import digest_of
from cluster.config.template import TEMPLATE
from cluster.files.line_reader import read_lines
from cluster.files.storage import Storage
from infra.tour.tour_config import adapt
from tests import waiting
from tests.kubernetes_pods import Pod
from tests.kubernetes_site import KubernetesUser, Operator, kubernetes_site
from tests.object_store import BUCKET, CREDENTIALS, make_bucket
from tests.ssh_hosts import HEALTH
from train_jobs.records.run_log import EVENTS, METRICS

WAIT_S = 200.0
wait_for = partial(waiting.wait_for, timeout_s=WAIT_S)
KEY = "sk-shoal-of-this-test"
KEYS = json.dumps([{"sha256": digest_of(KEY), "tenant": "everybody"}])
S3_PORT = 9000
S3 = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(S3_PORT)]
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
    },
}
ON_REDIS = {"backend": "redis", "address": "redis:6379"}
BODY = {"model": "chat", "prompt": "import os", "max_tokens": 8, "temperature": 0}


class BusySite:
    """Its app has one replica."""

    def __init__(self, operator: Operator, user: KubernetesUser, share: Path, *, in_s3: bool) -> None:
        self.operator, self.user, self._share, self._in_s3 = operator, user, share, in_s3
        self._answers: list[tuple[float, Any, float]] = []
        """When each was asked, what came of it, and after how many seconds."""
        self._ended = threading.Event()
        self.job = ""
        self.version = ""
        """Of the model that answered last."""

    def begin(self, store: dict[str, str] | None) -> None:
        """Bring the cluster up, train a model, serve it, and have another job go on."""
        document = yaml.safe_load(adapt(TEMPLATE, "lab", CLUSTER))
        if store is not None:
            document["cluster"]["kubernetes"]["store"] = store
        if self._in_s3:
            document["cluster"] |= {"storage": _uri("s3")}
            document["cluster"]["env"] |= dict.fromkeys(CREDENTIALS)
            del document["cluster"]["kubernetes"]["storage_claim"]
            threading.Thread(target=self._make_bucket, daemon=True).start()
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

    def storage(self) -> Storage:
        """The cluster's."""
        return Storage(_uri(self._host("s3")) if self._in_s3 else self._share)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A log of the job's run."""
        return read_lines(self.storage().child("jobs", self.job), name)

    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines(METRICS)]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.lines(EVENTS) if event["kind"] == kind]

    def _host(self, name: str) -> str:
        """The address of a host beside the pods."""
        wait_for(lambda: self.operator.pods is not None, "there are no pods")
        assert self.operator.pods is not None
        return self.operator.pods.lan.host(name).address

    def _make_bucket(self) -> None:
        make_bucket(self._host("s3"), S3_PORT)

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
            self._answers.append((began, said, time.monotonic() - began))

    def said(self, since: float = 0.0) -> list[Any]:
        """What came of what was asked since then."""
        return [said for began, said, _ in self._answers if began >= since]

    def longest_s(self, since: float) -> float:
        """What the slowest answer to those asked since then took."""
        return max(took for began, _, took in self._answers if began >= since)

    def is_used(self, pod: Pod) -> bool:
        """Whether a job or an app holds something there."""
        return pod.name in self.used_by("training") | self.used_by("serving")


@contextmanager
def busy_site(directory: Path, store: dict[str, str] | None, *, in_s3: bool = False) -> Iterator[BusySite]:
    """All of it, at work.

    Args:
        store: where what Ray knows is kept; None: on the head.
        in_s3: whether the storage is an object store; else all pods have one volume.
    """
    beside = {"redis": REDIS, **({"s3": S3} if in_s3 else {})}
    with (
        pytest.MonkeyPatch.context() as patch,
        kubernetes_site(directory, spare=4, beside=beside) as (_, operator, user),
    ):
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        user.environment |= {"KEYS": KEYS, **CREDENTIALS}
        site = BusySite(operator, user, directory / "share", in_s3=in_s3)
        try:
            site.begin(store)
            yield site
        finally:
            site.end()
            logs = [pod.log for pod in operator.pods.pods] if operator.pods is not None else []
            user.shoal("down")  # and with it what forwards ports to this machine
            for log in logs:
                print(f"== {log.name}\n{log.read_text(errors='replace')[-4000:]}")


def _uri(host: str) -> str:
    return f"s3://{BUCKET}/lab?endpoint_override={host}:{S3_PORT}&scheme=http&region=us-east-1"
