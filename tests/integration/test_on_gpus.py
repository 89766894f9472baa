"""Several GPUs of one machine: strategies, a rank that is killed or stands still, groups that come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clusters import LiveCluster, started
from tests.gpu import on_a_gpu
from tests.integration.jobs import JOB, JobFile, events, finished, job_file, losses, metrics, wait_until
from tests.train_jobs.ranks import merged, write_corpus

GPUS = min(8, torch.cuda.device_count())
FOUR = pytest.mark.skipif(GPUS < 4, reason="there are no four GPUs")
pytestmark = [
    *on_a_gpu,
    pytest.mark.skipif(GPUS < 2, reason="there are no two GPUs"),
    pytest.mark.timeout(400),
]

ON_TWO: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"strategy": "ddp", "tensor": 2},
    "context": {"strategy": "ddp", "context": 2},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "hsdp": {"strategy": "hsdp", "shard": 2},
    "fsdp-tensor": {"strategy": "fsdp", "tensor": 2},
    "fsdp-context": {"strategy": "fsdp", "context": 2},
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    nodes = f"nodes: [{{name: head, cpus: 0}}, {{name: gpu, cpus: {2 * GPUS}, gpus: {GPUS}}}]"
    with started(
        tmp_path_factory.mktemp("cluster"), nodes, "storage: ./storage", "sharing: {avoid_after: 0}"
    ) as live:
        yield live


@pytest.fixture(scope="module")
def jobs(live: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> JobFile:
    directory = tmp_path_factory.mktemp("jobs")
    corpus = write_corpus(directory / "corpus.parquet")
    job = merged(JOB, {"data": {"source": str(corpus)}, "batch": {"global": 8, "micro": 2}, "steps": 60})

    def on(count: int, **changes: Any) -> dict[str, Any]:
        return merged(merged(job, {"workers": {"min": count, "max": count, "gpus": 1}}), changes)

    jobs = {name: on(2, parallel=parallel) for name, parallel in ON_TWO.items()}
    if GPUS >= 4:
        jobs |= {name: on(4, parallel=parallel) for name, parallel in ON_FOUR.items()}
    # One process with both.
    jobs["data-parallel"] = on(1, parallel={"strategy": "data_parallel"}, workers={"gpus": 2})
    jobs["on-cpu"] = merged(job, {"workers": {"min": 1, "max": 1}})
    jobs["killed"] = on(2, steps=400)
    jobs["still"] = on(2, steps=200, parallel={"strategy": "ddp"}, recovery={"hang_timeout_s": 10.0})
    grows = {"min": 1, "max": 2, "group": 1, "gpus": 1}
    endless = {"steps": 1_000_000, "evaluate": {"every_steps": None}}
    jobs["groups"] = merged(job, {"parallel": {"strategy": "ddp"}, "workers": grows, **endless})
    jobs["visitor"] = merged(job, {"workers": {"min": 1, "max": 1, "gpus": 1}, "priority": 10})
    return job_file(live, directory, jobs)


@pytest.fixture(scope="module")
def on_cpu(jobs: JobFile) -> dict[int, float]:
    run = jobs.submit("on-cpu")
    assert finished(run)["status"] == "succeeded"
    return losses(run)


@pytest.mark.parametrize(
    "name", ["data-parallel", *ON_TWO, *(pytest.param(name, marks=FOUR) for name in ON_FOUR)]
)
def test_ranks_on_gpus_lose_what_one_process_on_a_cpu_loses(
    name: str, jobs: JobFile, on_cpu: dict[int, float]
) -> None:
    run = jobs.submit(name)
    assert finished(run)["status"] == "succeeded"
    assert losses(run) == pytest.approx(on_cpu, rel=2e-3)


def rank_of(run: Path, rank: int) -> int:
    """Its process, in the attempt that was begun last."""
    return next(each["pid"] for each in events(run, "started")[-1]["ranks"] if each["rank"] == rank)


def test_a_rank_that_is_killed_goes_on_from_the_checkpoint(jobs: JobFile) -> None:
    run = jobs.submit("killed")
    wait_until(lambda: len(metrics(run)) > 120, "120 steps")
    os.kill(rank_of(run, 1), signal.SIGKILL)
    assert finished(run)["status"] == "succeeded"
    assert [event["failure_class"] for event in events(run, "failed")] == ["worker"]
    assert events(run, "failed")[0]["rank"] == 1
    assert next(line["step"] for line in metrics(run) if line["attempt"] == 2) > 50
    assert set(losses(run)) == set(range(1, 401))


def test_the_rank_that_stands_still_is_named_and_not_the_one_that_waits_for_it(jobs: JobFile) -> None:
    run = jobs.submit("still")
    wait_until(lambda: len(metrics(run)) > 60, "60 steps")
    os.kill(rank_of(run, 1), signal.SIGSTOP)
    assert finished(run)["status"] == "succeeded"
    (failed,) = events(run, "failed")
    assert (failed["failure_class"], failed["rank"]) == ("hang", 1)
    assert list((run / "logs" / "attempt-1").glob("rank-*.stack"))


def test_groups_on_gpus_join_leave_and_die_while_the_other_steps(jobs: JobFile) -> None:
    run = jobs.submit("groups")

    def at(size: int, since: int) -> int:
        found = wait_until(
            lambda: next(
                (line for line in metrics(run) if line["world_size"] == size and line["step"] > since), None
            ),
            f"a step of {size} groups after step {since}",
        )
        return int(found["step"])

    step = at(2, 0)
    pids = [rank["pid"] for event in events(run, "started") for rank in event["ranks"]]
    os.kill(pids[-1], signal.SIGKILL)
    step = at(2, at(1, step))
    visitors = [jobs.submit("visitor") for _ in range(GPUS - 1)]
    step = at(1, step)
    assert {finished(each)["status"] for each in visitors} == {"succeeded"}
    at(2, step)
    assert jobs.shoal("stop", run.name).returncode == 0
    assert finished(run)["status"] == "stopped"
    assert [line["step"] for line in metrics(run)] == list(range(1, len(metrics(run)) + 1))
    started = events(run, "started")
    assert all("not run on GPUs" in " ".join(event["notes"]) for event in started), "take the note away now"
