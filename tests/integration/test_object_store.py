"""Training on a cluster whose storage is an object store: an S3 server, and nothing that nodes share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.files.storage import Storage
from tests.clusters import LiveCluster, started
from tests.integration.jobs import JOB, TIMEOUT_S, JobFile, job_file, wait_until
from tests.object_store import CREDENTIALS, late, object_store, uri
from tests.train_jobs.ranks import merged, write_corpus
from train_jobs.records.run_log import read_events, read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def behind() -> Iterator[tuple[int, threading.Event]]:
    """The port of a store, and what is set to have it take the events of runs late."""
    with object_store() as port, late(port, r"/jobs/[^/]+/events/", 2.0) as (front, asked):
        yield front, asked


@pytest.fixture(scope="module")
def storage(behind: tuple[int, threading.Event]) -> Iterator[Storage]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield Storage(uri(behind[0], "cluster"))


@pytest.fixture(scope="module")
def live(storage: Storage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    nodes = "nodes: [{name: head, cpus: 0}, {name: worker, count: 2, cpus: 1}]"
    with started(tmp_path_factory.mktemp("cluster"), nodes, f'storage: "{storage.location}"') as cluster:
        yield cluster


@pytest.fixture(scope="module")
def jobs(live: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> JobFile:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")
    job = merged(
        JOB, {"data": {"source": str(corpus)}, "publish": "tiny", "checkpoint": {"every_steps": 100}}
    )
    return job_file(live, tmp_path_factory.mktemp("jobs"), {"tiny": job})


def events(run: Storage, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["kind"] == kind]


@pytest.fixture(scope="module")
def killed(jobs: JobFile, storage: Storage) -> tuple[Storage, dict[str, Any]]:
    """A run one of whose ranks was killed after its first checkpoint, and its result."""
    training = jobs.start("train", "tiny", "--json")
    try:
        (job,) = wait_until(lambda: storage.list("jobs"), "a job")
        run = storage.child("jobs", job)
        wait_until(lambda: events(run, "checkpointed"), "the first checkpoint")
        (begun,) = events(run, "started")
        os.kill(begun["ranks"][1]["pid"], signal.SIGKILL)
        out, error = training.communicate(timeout=TIMEOUT_S)
    finally:
        training.kill()
    assert training.returncode == 0, error
    return run, json.loads(out)


def test_a_killed_job_goes_on_from_a_checkpoint_in_the_object_store(
    killed: tuple[Storage, dict[str, Any]],
) -> None:
    run, result = killed
    assert result["status"] == "succeeded"
    assert result["path"] == run.location
    _, second = events(run, "started")
    assert second["step"] >= 100
    assert second["step"] % 100 == 0
    assert [line["step"] for line in read_metrics(run)] == list(range(1, 301))
    left = set(run.list())
    assert {"checkpoints", "data", "events", "metrics"} <= left
    assert not left & {"export", "ray_train"}, "what only the run itself needs is deleted at its end"


def test_its_model_and_checkpoints_are_used_like_any_other(
    jobs: JobFile, killed: tuple[Storage, dict[str, Any]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    _, result = killed
    assert result["model"] == "tiny@1"
    shown = json.loads(jobs.shoal("models", "--json").stdout)
    assert "s3://" in json.dumps(shown)
    listed = json.loads(jobs.shoal("checkpoints", result["job"], "--json").stdout)
    assert [(each["step"], each["complete"]) for each in listed] == [(100, True), (200, True), (300, True)]
    exported = jobs.shoal("export", f"{result['job']}@200", str(tmp_path / "model"))
    assert exported.returncode == 0, exported.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 0

    refused = jobs.shoal("resume", result["job"], "--set", "steps=none")
    assert (refused.returncode, "--set: train_jobs.tiny.steps: should be" in refused.stderr) == (2, True)


def test_a_new_model_is_published_though_the_store_takes_what_is_logged_of_it_late(
    jobs: JobFile, killed: tuple[Storage, dict[str, Any]], behind: tuple[int, threading.Event]
) -> None:
    _, result = killed
    behind[1].set()
    try:
        done = jobs.shoal("resume", result["job"], "--set", "steps=305", "--json")
    finally:
        behind[1].clear()
    assert done.returncode == 0, done.stderr
    resumed = json.loads(done.stdout)
    assert (resumed["status"], resumed["step"], resumed["model"]) == ("succeeded", 305, "tiny@2")


def test_a_script_is_refused_where_no_directory_is_shared(jobs: JobFile, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    text = jobs.path.read_text()
    section = "train_jobs: " + json.dumps({"own": {"task": "script", "script": "train.py"}})
    (tmp_path / "shoal.yaml").write_text(text[: text.index("train_jobs:")] + section + "\n")
    done: subprocess.CompletedProcess[str] = JobFile(jobs.live, tmp_path / "shoal.yaml").shoal("train", "own")
    assert done.returncode == 2
    assert "train_jobs.own.task" in done.stderr
    assert "every node mounts" in done.stderr
