"""One GPU, as people use it: jobs train on it, survive kill -9, and get it after an app that served there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clusters import LiveCluster, started
from tests.gpu import on_a_gpu
from tests.integration.jobs import JOB, JobFile, events, finished, job_file, losses, metrics, wait_until
from tests.serve_apps.tiny_model import make_model
from tests.train_jobs.ranks import merged, write_corpus

pytestmark = [*on_a_gpu, pytest.mark.timeout(400)]

STRATEGIES = ("data_parallel", "ddp", "fsdp", "zero1", "zero2", "zero3")
NODES = ("nodes: [{name: head, cpus: 0}, {name: gpu, cpus: 6, gpus: 1}]", "storage: ./storage")
SHARING = "sharing: {avoid_after: 0}"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with started(tmp_path_factory.mktemp("cluster"), *NODES, SHARING) as live:
        yield live


@pytest.fixture(scope="module")
def jobs(live: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> JobFile:
    """A job for each strategy, on the GPU and on a CPU, and an app; one file for all."""
    directory = tmp_path_factory.mktemp("jobs")
    corpus = write_corpus(directory / "corpus.parquet")
    one: dict[str, Any] = merged(
        JOB, {"data": {"source": str(corpus)}, "workers": {"min": 1, "max": 1, "gpus": 1}, "steps": 60}
    )
    each = {name.replace("_", "-"): merged(one, {"parallel": {"strategy": name}}) for name in STRATEGIES}
    on_cpu = {"on-cpu": merged(one, {"workers": {"gpus": 0}})}
    half = {"half": merged(one, {"precision": "bf16", "steps": 300})}
    file = job_file(live, directory, {**each, **on_cpu, **half})
    app = {"model": str(make_model(directory / "model")), "gpus": 1, "engine": "torch"}
    file.path.write_text(f"{file.path.read_text()}serve_apps: {json.dumps({'chat': app})}\n")
    return file


@pytest.fixture(scope="module")
def on_cpu(jobs: JobFile) -> dict[int, float]:
    run = jobs.submit("on-cpu")
    assert finished(run)["status"] == "succeeded"
    return losses(run)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_on_the_gpu_loses_what_the_cpu_loses(
    strategy: str, jobs: JobFile, on_cpu: dict[int, float]
) -> None:
    run = jobs.submit(strategy.replace("_", "-"))
    assert finished(run)["status"] == "succeeded"
    assert losses(run) == pytest.approx(on_cpu, rel=2e-3)


def test_a_worker_that_is_killed_on_the_gpu_goes_on_from_its_checkpoint(jobs: JobFile) -> None:
    run = jobs.submit("half")
    wait_until(lambda: len(metrics(run)) > 120, "120 steps")
    (rank,) = events(run, "started")[0]["ranks"]
    os.kill(rank["pid"], signal.SIGKILL)
    assert finished(run)["status"] == "succeeded"
    begun = events(run, "started")
    assert len(begun) == 2
    assert set(losses(run)) == set(range(1, 301))
    assert next(line["step"] for line in metrics(run) if line["attempt"] == 2) > 50


def test_an_app_answers_on_the_gpu_and_a_job_has_it_next(jobs: JobFile) -> None:
    done = jobs.shoal("serve", "chat", "--json")
    assert done.returncode == 0, done.stderr
    url = json.loads(done.stdout)["base_url"]
    asked = {"model": "chat", "prompt": "def main():", "max_tokens": 20, "temperature": 0}
    answers = [httpx.post(f"{url}/completions", json=asked, timeout=30).json() for _ in range(2)]
    assert answers[0]["choices"][0]["finish_reason"] in ("stop", "length")
    assert answers[0]["choices"] == answers[1]["choices"]
    run = jobs.submit("fsdp")
    waits = wait_until(
        lambda: [e["reason"] for e in events(run, "waiting") if e["reason"]], "the job to wait"
    )
    assert "0 GPU free (chat holds 1)" in waits[-1]
    assert not events(run, "leased")
    assert jobs.shoal("unserve", "chat").returncode == 0
    assert finished(run)["status"] == "succeeded"
