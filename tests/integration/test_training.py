"""Training on a real cluster of several nodes: publication, recovery, mistakes, leases, stopping."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cluster.files.storage import Storage
from tests import clusters
from tests.clusters import LiveCluster
from tests.integration.jobs import (
    JOB,
    TIMEOUT_S,
    JobFile,
    events,
    finished,
    job_file,
    losses,
    metrics,
    wait_until,
)
from tests.train_jobs.ranks import merged, write_corpus
from train_jobs.data.documents import read_documents
from train_jobs.records.run_config import read_run_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


@pytest.fixture(scope="module")
def jobs(running_cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> JobFile:
    job = merged(JOB, {"data": {"source": str(corpus)}})
    return job_file(
        running_cluster,
        tmp_path_factory.mktemp("jobs"),
        {
            "tiny": {**job, "publish": "tiny"},
            "unreadable": merged(job, {"data": {"source": str(torn(corpus))}}),
            "broken": merged(job, {"optimizer": {"learning_rate": 1e30, "schedule": "constant"}}),
            "elastic": merged(
                job,
                {
                    "workers": {"min": 1, "max": 4},
                    "batch": {"global": 12, "micro": 1},
                    "steps": 100000,
                    "checkpoint": {"every_steps": 1000},
                },
            ),
        },
    )


def torn(corpus: Path) -> Path:
    """A copy whose footer is whole, and whose only row group is not."""
    copy = corpus.with_name("torn.parquet")
    content = bytearray(corpus.read_bytes())
    content[4:1000] = b"\xff" * 996
    copy.write_bytes(content)
    return copy


@pytest.fixture(scope="module")
def broken(jobs: JobFile) -> Iterator[subprocess.Popen[str]]:
    """A job that runs into a mistake, beside the one that `undisturbed` waits for."""
    process = jobs.start("train", "broken", "--json")
    yield process
    process.kill()


@pytest.fixture(scope="module")
def undisturbed(jobs: JobFile, broken: subprocess.Popen[str]) -> dict[str, Any]:
    """The result of a run that nothing happened to."""
    code, result = jobs.train("tiny")
    assert code == 0, result
    return result


def test_a_job_trains_evaluates_and_publishes_what_transformers_loads(undisturbed: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result, run = undisturbed, Path(undisturbed["path"])
    assert (result["status"], result["step"], result["attempts"]) == ("succeeded", 300, 1)
    assert result["world_sizes"] == [2]
    assert result["error"] is None
    assert sorted(losses(run)) == list(range(1, 301))
    assert losses(run)[300] < 0.5 * losses(run)[1]
    assert [event["step"] for event in events(run, "evaluated")] == [100, 200, 300]
    assert [event["step"] for event in events(run, "checkpointed")] == [50, 100, 150, 200, 250, 300]
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step-00000200", "step-00000250", "step-00000300"]

    model, number = result["model"].split("@")
    published = run.parent.parent / "models" / model / number
    facts = json.loads((published / "shoal.json").read_text())
    assert (facts["job"], facts["step"]) == (result["job"], 300)
    assert facts["evaluation"]["loss"] == result["evaluation"]["loss"]

    from tests.train_jobs.ranks import held_out_loss

    config = read_run_config(Storage(run.parent.parent), result["job"])[1]
    tokenizer = AutoTokenizer.from_pretrained(published)
    texts = [document.text for document in read_documents(config.data) if document.held_out]
    text = "".join(f"{text}{tokenizer.eos_token}" for text in texts)
    stream = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"])
    loss, tokens = held_out_loss(published, stream, config.data.sequence_length)
    assert result["evaluation"]["tokens"] == tokens
    assert result["evaluation"]["loss"] == pytest.approx(loss, abs=1e-5)
    assert AutoModelForCausalLM.from_pretrained(published).config.vocab_size == 300


def test_data_that_turns_out_broken_is_a_wrong_request_and_takes_no_worker(jobs: JobFile) -> None:
    code, result = jobs.train("unreadable")
    assert (code, result["status"], result["attempts"]) == (2, "failed", 0)
    assert "torn.parquet (data.source), row group 0: column 'text' cannot be read" in result["error"]
    assert not events(Path(result["path"]), "leased")


def test_a_mistake_ends_the_job_at_once_with_its_traceback(
    broken: subprocess.Popen[str], undisturbed: dict[str, Any]
) -> None:
    out, error = broken.communicate(timeout=TIMEOUT_S)
    assert broken.returncode == 1, error
    result = json.loads(out)
    assert (result["status"], result["attempts"]) == ("failed", 1)
    assert result["error"].startswith("Traceback (most recent call last)")
    assert "LossError: the norm of the gradient is nan in step 2" in result["error"]
    (failure,) = events(Path(result["path"]), "failed")
    assert (failure["failure_class"], failure["step"]) == ("loss", 1)


HOLD_TWO_CPUS = """
import sys, threading
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand
import ray
ray.init(namespace="shoal", log_to_driver=False)
broker = BrokerClient()
asked = dict(holder="app/other", kind="serving", unit={"CPU": 2.0}, min=1, max=1)
grant = broker.wait(Demand(**asked), 30)
print("granted", flush=True)
end = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
while not end.wait(1.0):
    broker.request(Demand(**asked, held=grant.nodes))
broker.release("app/other")
"""


def test_an_elastic_job_takes_what_serving_leaves_is_stopped_and_goes_on_with_more(jobs: JobFile) -> None:
    """Two of four CPUs are leased to an app: the job, which could take four workers, starts with two."""
    with jobs.live.running(HOLD_TWO_CPUS, "granted"):
        run = jobs.submit("elastic")
        wait_until(lambda: len(metrics(run)) >= 20, "step 20")
        kill_control(jobs, run)
        refused = jobs.shoal("resume", run.name)
        assert refused.returncode == 2
        assert "runs" in refused.stderr

        stopped = jobs.shoal("stop", run.name, "--json")
    assert stopped.returncode == 0, stopped.stderr
    document = json.loads(stopped.stdout)
    assert (document["status"], document["world_sizes"]) == ("stopped", [2])
    step = document["step"]
    assert step == max(losses(run)) >= 20
    assert (run / "checkpoints" / f"step-{step:08d}" / "committed.json").exists()
    assert jobs.shoal("stop", run.name).returncode == 2

    refused = jobs.shoal("resume", run.name, "--set", "parallel.tensor=3")
    assert refused.returncode == 2
    assert "--set: train_jobs.elastic.parallel.tensor: should divide the model's attention" in refused.stderr

    resumed = jobs.shoal("resume", run.name, "--set", f"steps={step + 5}", "--json")
    assert resumed.returncode == 0, resumed.stderr
    result = json.loads(resumed.stdout)
    assert (result["status"], result["step"], result["attempts"]) == ("succeeded", step + 5, 2)
    assert result["world_sizes"] == [2, 4]
    assert sorted(losses(run)) == list(range(1, step + 6))
    listed = json.loads(jobs.shoal("jobs", "--json").stdout)
    (row,) = [row for row in listed if row["job"] == run.name]
    assert (row["status"], row["step"], row["steps"], row["workers"]) == ("succeeded", step + 5, step + 5, 0)
    assert "finished" in jobs.shoal("logs", run.name).stdout
    assert jobs.shoal("logs", "no-such-job").returncode == 2


def kill_control(jobs: JobFile, run: Path) -> None:
    """Kill the actor that writes a running job's logs; the job steps on, and its steps are logged."""
    (control,) = jobs.live.processes("ray::JobControl")
    control.kill()
    written = len(metrics(run))
    wait_until(lambda: len(metrics(run)) > written, "a step after that")


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[LiveCluster]:
    """Nodes of one CPU: the two workers of a job are on two of them, and the third is spare."""
    nodes = "nodes: [{name: head, cpus: 0}, {name: worker, count: 3, cpus: 1}]"
    with clusters.started(tmp_path / "cluster", nodes, "storage: ./storage") as live:
        yield live


def test_a_killed_worker_and_a_killed_raylet_cost_no_bit_of_the_result(
    own_cluster: LiveCluster, undisturbed: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    """First one process is lost, then a whole node, with rank 0 and all that steers the group beside it."""
    jobs = job_file(own_cluster, tmp_path, {"tiny": merged(JOB, {"data": {"source": str(corpus)}})})
    run = jobs.submit("tiny")
    first = wait_until(lambda: next(iter(events(run, "started")), None), "the start")["ranks"]
    assert first[0]["node"] != first[1]["node"]
    wait_until(lambda: len(metrics(run)) >= 70, "step 70")
    workers = {process.pid for process in own_cluster.processes("ray::RayTrainWorker")}
    os.kill(first[1]["pid"], signal.SIGKILL)

    second = wait_until(lambda: next(iter(events(run, "started")[1:]), None), "the second start")["ranks"]
    assert {process.pid for process in own_cluster.processes("ray::RayTrainWorker")} == workers
    wait_until(lambda: max(losses(run)) >= 170, "step 170")
    lost = second[0]["node"]
    raylet = own_cluster.raylet(lost)
    (runner,) = own_cluster.processes("ray::GroupRunner")
    assert runner.ppid() == raylet.pid, "the group is steered from its own first node"
    raylet.kill()
    assert finished(run)["status"] == "succeeded"

    failures = [(event["failure_class"], event["rank"], event["node"]) for event in events(run, "failed")]
    assert failures == [("worker", 1, first[1]["node"]), ("node", 0, lost)]
    last = events(run, "started")[-1]
    assert lost not in {rank["node"] for rank in last["ranks"]}
    again = {
        attempt: [line["step"] for line in metrics(run) if line["attempt"] == attempt]
        for attempt in (2, last["attempt"])
    }
    assert again[2][0] in (51, 101, 151), "it goes on from the newest checkpoint"
    rest = again[last["attempt"]]
    assert rest == list(range(rest[0], 301))
    assert rest[0] in (151, 201, 251)
    assert losses(run) == losses(Path(undisturbed["path"]))
    assert events(run, "evaluated")[-1]["loss"] == undisturbed["evaluation"]["loss"]


def test_a_job_whose_driver_is_killed_frees_its_devices_and_is_resumed(
    jobs: JobFile, undisturbed: dict[str, Any]
) -> None:
    process = jobs.start("train", "tiny", "--json")
    storage = Path(jobs.live.record.storage) / "jobs"
    newest = wait_until(lambda: newest_run(storage, Path(undisturbed["path"])), "a new job")
    wait_until(lambda: len(metrics(newest)) >= 120, "step 120")
    os.kill(events(newest, "preparing")[0]["pid"], signal.SIGKILL)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    result = json.loads(out)
    assert (process.returncode, result["status"]) == (1, "failed")
    assert result["error"].startswith("the driver ended")
    assert events(newest, "finished") == []

    def nothing_is_left() -> bool:
        leases = json.loads(jobs.shoal("status", "--json").stdout)["leases"]
        return not jobs.live.processes("RayTrainWorker") and leases == []

    wait_until(nothing_is_left, "the end of its workers and its lease", 30)
    (row,) = [row for row in json.loads(jobs.shoal("jobs", "--json").stdout) if row["path"] == str(newest)]
    assert row["status"] == "failed"
    resumed = json.loads(jobs.shoal("resume", newest.name, "--json").stdout)
    assert (resumed["status"], resumed["attempts"]) == ("succeeded", 2)
    assert losses(newest) == losses(Path(undisturbed["path"]))


def test_what_prepares_a_jobs_data_is_a_fork_of_the_nodes_server(
    jobs: JobFile, undisturbed: dict[str, Any]
) -> None:
    process = jobs.start("train", "tiny", "--json", "--set", "data.held_out_every=7")
    seen: set[str] = set()
    while process.poll() is None:
        for each in jobs.live.processes("shoal::ForkServer:data") + jobs.live.processes("node.fork_server"):
            with suppress(psutil.Error):
                seen.add(" ".join(each.cmdline())[:80])
        time.sleep(0.02)
    assert process.returncode == 0
    assert any("shoal::ForkServer:data" in each for each in seen), seen
    assert not any("cluster.node.fork_server" in each for each in seen), seen


HOLD_ALL_CPUS = """
import sys
import ray
ray.init(log_to_driver=False)
@ray.remote(num_cpus=1)
class Held:
    def ready(self):
        pass
held = [Held.remote() for _ in range(4)]
ray.get([each.ready.remote() for each in held])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_group_that_cannot_start_is_leased_again(jobs: JobFile, undisturbed: dict[str, Any]) -> None:
    """Someone's own program has taken the CPUs past the ledger: the job does not wait for these for ever."""
    with jobs.live.running(HOLD_ALL_CPUS, "held"):
        run = jobs.submit("tiny")
        failed = wait_until(lambda: next(iter(events(run, "failed")), None), "the end of the first attempt")
    assert (failed["failure_class"], failed["attempt"], failed["rank"]) == ("start", 1, None)
    assert failed["reason"].startswith("NoDevicesError: the devices of group 1-0 were not free within 60 s")
    assert finished(run)["status"] == "succeeded"
    assert losses(run) == losses(Path(undisturbed["path"]))


def newest_run(storage: Path, other: Path) -> Path | None:
    """The directory of the newest job called tiny, once it is another than `other`."""
    runs = sorted(storage.glob("tiny-*"), key=lambda path: path.stat().st_mtime)
    return runs[-1] if runs and runs[-1] != other and events(runs[-1], "preparing") else None


def test_no_worker_of_any_job_is_left(jobs: JobFile, undisturbed: dict[str, Any]) -> None:
    """After the jobs of this file: no lease, and no process of a Ray Train run, of its helpers neither."""
    wait_until(
        lambda: json.loads(jobs.shoal("status", "--json").stdout)["leases"] == [], "the end of all leases", 60
    )
    titles = (
        "RayTrain",
        "GroupRunner",
        "TrainController",
        "PlacementGroup",
        "DatasetManager",
        "Synchronization",
        "_AutoscalingCoordinator",
    )
    assert not [process for title in titles for process in jobs.live.processes(f"ray::{title}")]
