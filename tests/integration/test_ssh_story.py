"""The whole way through Shoal on hosts by SSH, from a machine that is none of them: nothing is shared but an
object store, which is on a host of its own."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.files.storage import Storage
from infra.lab.hosts.lan import Lan
from tests import waiting
from tests.lans import needs_hosts, with_replicas
from tests.object_store import BUCKET, CREDENTIALS, make_bucket
from tests.ssh_hosts import HEALTH, USER, SshCaller, furnish
from train_jobs.records.run_log import read_all_metrics, read_events

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 200.0
wait_for = partial(waiting.wait_for, timeout_s=WAIT_S)
PORT = 9000
BODY = {"model": "chat", "prompt": "import os", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshCaller]:
    directory = tmp_path_factory.mktemp("ssh")
    with Lan(["head", "gpu-1", "gpu-2", "store"], directory, users=[USER]) as lan:
        furnish(lan)
        store = lan.host("store")
        server = [sys.executable, "-m", "moto.server", "-H", store.address, "-p", str(PORT)]
        process = store.start(*server)
        make_bucket(store.address, PORT)
        caller = SshCaller(lan, tmp_path_factory.mktemp("caller"), dict(CREDENTIALS))
        nodes = [
            {"name": name, "host": lan.host(name).address, "cpus": cpus}
            for name, cpus in {"head": 0, "gpu-1": 2, "gpu-2": 3}.items()
        ]
        options = f"endpoint_override={store.address}:{PORT}&scheme=http&region=us-east-1"
        env = {**HEALTH, **dict.fromkeys(CREDENTIALS)}  # those of the caller are passed on
        storage = f"s3://{BUCKET}/shoal?{options}"
        caller.write({"nodes": nodes, "storage": storage, "env": env, "gateway": {"count": "all"}})
        yield caller
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def tour(caller: SshCaller) -> Path:
    """The config of a cluster that the quickstart leaves up."""
    directory = caller.home / "tour"
    report = caller.document("quickstart", "--dir", directory, "--keep", timeout_s=600)
    for step in report["steps"]:
        print(f"{step['name']}: {step['seconds']:.1f} s: {step['detail']}")
    assert report["ok"]
    assert "steps lost, none of" in report["steps"][-1]["detail"]
    return directory / "shoal.yaml"


class Asking(threading.Thread):
    """Somebody who asks an app from this machine, one thing after another."""

    def __init__(self, base_url: str) -> None:
        super().__init__(daemon=True)
        self.answers: list[tuple[float, Any]] = []
        self._url, self._ended = f"{base_url}/completions", threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.2):
            began = time.monotonic()
            try:
                said: Any = httpx.post(self._url, json=BODY, timeout=20, trust_env=False).status_code
            except httpx.HTTPError as error:
                said = type(error).__name__
            self.answers.append((began, said))

    def said(self, since: float = 0.0) -> list[Any]:
        return [said for began, said in self.answers if began >= since]

    def end(self) -> None:
        self._ended.set()
        self.join()


def test_a_loss_of_power_is_got_over(caller: SshCaller, tour: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    exports = dict(
        line.removeprefix("export ").split("=", 1)
        for line in caller.shoal("env", file=tour).stdout.splitlines()
    )
    (model,) = {row["path"] for row in caller.document("models", file=tour)}
    tokenizer = f"data.tokenizer={model}"  # saves the time to train another
    job = caller.document("train", "elastic-lm", "--detach", "--set", tokenizer, file=tour)["job"]
    (row,) = [row for row in caller.document("jobs", file=tour) if row["job"] == job]
    run = Storage(caller.document("status", file=tour)["storage"]).child("jobs", job)
    assert row["path"].startswith("s3://")

    def steps() -> list[int]:
        return [line["step"] for line in read_all_metrics(run)]

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(run) if event["kind"] == kind]

    wait_for(lambda: len(steps()) > 20, "the job does no steps")
    asking = Asking(exports["SHOAL_BASE_URL"])
    asking.start()
    try:
        wait_for(lambda: len(asking.said()) > 5, "nobody asks")
        assert set(asking.said()) == {200}
        victim = caller.lan.host("gpu-1")  # the other has room for the app and a group of the job
        had = victim in with_replicas(caller.lan)
        cut = time.monotonic()
        victim.cut_power()
        back_s = wait_for(lambda: 200 in asking.said(cut + 0.1), "the app does not answer again")
        done = len(steps())
        wait_for(lambda: len(steps()) > done + 20, "the job does not go on")
        failed = [said for said in asking.said(cut) if said != 200]
        print(f"the host lost its power, with the replica: {had}; answers after {back_s:.1f} s")
        print(f"{len(failed)} of {len(asking.said(cut))} requests failed: {failed}")
        victim.boot()
        up = caller.shoal("up", file=tour)
        assert f"{victim.name} ({USER}@{victim.address}) did not run; it does now" in up.stderr, up.stderr
        asked = time.monotonic()
        wait_for(lambda: len(asking.said(asked)) > 10, "nobody asks any more")
        assert set(asking.said(asked)) == {200}
    finally:
        asking.end()
    assert caller.shoal("stop", job, file=tour).returncode == 0
    logged = steps()
    assert sorted(set(logged)) == list(range(1, max(logged) + 1)), "a step was lost"


def test_a_batch_is_answered_from_here(
    caller: SshCaller, tour: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    storage = Storage(caller.document("status", file=tour)["storage"])
    prompts = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": ["import os", "def f(x):", "class A:"]}), prompts)
    storage.write_bytes("prompts/a.parquet", prompts.read_bytes())
    places = {"--input": storage.child("prompts").location, "--output": storage.child("answers").location}
    options = [word for pair in places.items() for word in pair]
    done = caller.document("batch", "chat", *options, "--max-tokens", "4", file=tour, timeout_s=180)
    assert (done["rows"], done["failed"]) == (3, 0)
    again = caller.document("batch", "chat", *options, "--max-tokens", "4", file=tour)
    assert again["skipped"] == 3
    wrong = caller.shoal("batch", "chat", "--input", "prompts", "--output", "/answers", file=tour)
    assert wrong.returncode == 2
    assert "input: should be a path from the root, or a URI, was 'prompts'" in wrong.stderr


def test_a_model_is_exported_to_here(caller: SshCaller, tour: Path) -> None:
    from transformers import AutoModelForCausalLM

    done = caller.document("export", "stdlib-lm", "mine", file=tour)
    assert done["step"] == 80
    assert AutoModelForCausalLM.from_pretrained(caller.home / "mine").num_parameters() > 0


def test_down_leaves_nothing_on_any_host(caller: SshCaller, tour: Path) -> None:
    done = caller.shoal("down", file=tour, timeout_s=300)
    assert done.returncode == 0, done.stderr
    for name in ("head", "gpu-1", "gpu-2"):
        assert caller.lan.host(name).names() == set()
