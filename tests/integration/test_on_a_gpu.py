"""One GPU, as people use it: jobs train on it, survive kill -9, and get it after an app that served there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from tests.clusters import LiveCluster, started
from tests.gpu import on_a_gpu
from tests.integration.jobs import JOB, JobFile, events, finished, job_file, losses, metrics, wait_until
from tests.serve_apps.tiny_model import make_model
from tests.train_jobs.ranks import merged, write_corpus
from tests.train_jobs.tasks.test_custom_task import EXAMPLE

pytestmark = [*on_a_gpu, pytest.mark.timeout(400)]

ENGINES = ["torch", *(["vllm"] if find_spec("vllm") is not None else [])]
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
    still = {"still": merged(one, {"steps": 200, "recovery": {"hang_timeout_s": 10.0}})}
    behind = {"checkpoint": {"every_steps": 5, "asynchronous": True}, "parallel": {"strategy": "fsdp"}}
    saves = {"saves": merged(one, behind)}
    (directory / "my_task.py").write_text(EXAMPLE)
    task = {"task": "my_task:Task", "parallel": {"strategy": "fsdp"}, "steps": 40, "workers": one["workers"]}
    own = {"own": {**task, "optimizer": {"learning_rate": 1e-2}, "batch": {"global": 8, "micro": 2}}}
    file = job_file(live, directory, {**each, **on_cpu, **half, **still, **saves, **own})
    model = str(make_model(directory / "model"))
    apps = {f"of-{engine}": {"model": model, "gpus": 1, "engine": engine} for engine in ENGINES}
    file.path.write_text(f"{file.path.read_text()}serve_apps: {json.dumps(apps)}\n")
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


def test_what_is_saved_behind_the_steps_is_what_the_job_goes_on_from(
    jobs: JobFile, on_cpu: dict[int, float]
) -> None:
    run = jobs.submit("saves")
    wait_until(lambda: len(events(run, "checkpointed")) > 2, "three checkpoints")
    (rank,) = events(run, "started")[0]["ranks"]
    os.kill(rank["pid"], signal.SIGKILL)
    assert finished(run)["status"] == "succeeded"
    assert events(run, "started")[1]["step"] >= 10
    assert not events(run, "checkpoint_failed")
    assert losses(run) == pytest.approx(on_cpu, rel=2e-3)


def test_a_rank_that_stands_still_is_seen_and_the_job_goes_on(jobs: JobFile) -> None:
    run = jobs.submit("still")
    wait_until(lambda: len(metrics(run)) > 60, "60 steps")
    (rank,) = events(run, "started")[0]["ranks"]
    os.kill(rank["pid"], signal.SIGSTOP)
    assert finished(run)["status"] == "succeeded"
    (failed,) = events(run, "failed")
    assert (failed["failure_class"], failed["rank"]) == ("hang", 0)


def test_the_task_of_the_documentation_learns_on_the_gpu(jobs: JobFile) -> None:
    run = jobs.submit("own")
    assert finished(run)["status"] == "succeeded"
    assert losses(run)[40] < losses(run)[1] - 0.5


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_an_app_answers_on_the_gpu_and_a_job_has_it_next(engine: str, jobs: JobFile) -> None:
    if engine not in ENGINES:
        pytest.skip("vLLM is not installed")
    app = f"of-{engine}"
    done = jobs.shoal("serve", app, "--json")
    assert done.returncode == 0, done.stderr
    url = json.loads(done.stdout)["base_url"]
    asked = {"model": app, "prompt": "def main():", "max_tokens": 20, "temperature": 0}
    answers = [httpx.post(f"{url}/completions", json=asked, timeout=30).json() for _ in range(2)]
    assert answers[0]["choices"][0]["finish_reason"] in ("stop", "length")
    assert answers[0]["choices"] == answers[1]["choices"]
    run = jobs.submit("fsdp")
    waits = wait_until(
        lambda: [e["reason"] for e in events(run, "waiting") if e["reason"]], "the job to wait"
    )
    assert f"0 GPU free ({app} holds 1)" in waits[-1]
    assert not events(run, "leased")
    assert jobs.shoal("unserve", app).returncode == 0
    assert finished(run)["status"] == "succeeded"
