"""Elastic jobs on a real cluster: their groups come and go with the grant and with what dies."""

from __future__ import annotations

import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.config.sections.train import RecoveryConfig
from cluster.hosts.processes import NODE_NAME
from infra.lab.faults.laboratory import job_config
from tests import clusters
from tests.clusters import LiveCluster
from tests.integration.jobs import (
    JOB,
    JobFile,
    events,
    finished,
    job_file,
    metrics,
    stop_what_runs,
    wait_until,
)
from tests.train_jobs.ranks import merged, write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GRACE_S = 5.0
FATAL = "fatal"
SLOW_S = 10.0
"""Longer than a group takes to start."""

REPLICA = """
import sys, threading, time
import ray
ray.init(namespace="shoal", log_to_driver=False)
from cluster.state.nodes import NODE_LABEL
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand

held = tuple(row["NodeID"] for row in ray.nodes() if row["Labels"].get(NODE_LABEL) == "{node}")
demand = Demand("app/{name}", "serving", {{"CPU": {cpus}}}, 1, 1, held=held)
has_place, over = threading.Event(), threading.Event()

def ask():
    while not over.wait(0.5):
        if BrokerClient().request(demand).units or held:
            has_place.set()

asking = threading.Thread(target=ask)
asking.start()
has_place.wait()
print("has a place", flush=True)
sys.stdin.read()
over.set()
asking.join()
BrokerClient().release(demand.holder)
"""
"""The lease of a replica that Serve has put on a node, whoever was granted it, or that looks for a place."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    lines = (
        "nodes: [{name: head, cpus: 0}, {name: worker, count: 2, cpus: 2}]",
        "storage: ./storage",
        f"sharing: {{reclaim_grace_s: {GRACE_S}, avoid_after: 0}}",
    )
    with clusters.started(tmp_path_factory.mktemp("cluster"), *lines) as live:
        yield live


@pytest.fixture(scope="module")
def jobs(live: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> JobFile:
    directory = tmp_path_factory.mktemp("jobs")
    shutil.copy(Path(__file__).with_name("fragile_task.py"), directory)
    settings = {"pause_s": 0.04, "orders": str(directory), "fatal": str(directory / FATAL)}
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")
    job = merged(JOB, {"data": {"source": str(corpus)}, "batch": {"global": 24, "micro": 2}})
    return job_file(
        live,
        directory,
        {
            "groups": merged(
                job,
                {"parallel": {"strategy": "ddp"}, "workers": {"min": 1, "max": 3}, "steps": 1_000_000},
            ),
            "pair": merged(
                job,
                {"parallel": {"strategy": "ddp"}, "workers": {"min": 1, "max": 2}, "steps": 1_000_000},
            ),
            "whole-pair": merged(job, {"workers": {"min": 1, "max": 2}, "steps": 1_000_000}),
            "whole": merged(job, {"workers": {"min": 1, "max": 3}, "steps": 1_000_000}),
            "fragile": {
                **job_config(directory),
                "task": "fragile_task:Task",
                "settings": settings,
                "parallel": {"strategy": "ddp"},
                "workers": {"min": 1, "max": 3, "group": 1},
                "batch": {"global": 12, "micro": 4},
                "recovery": {"worker_failures": 2},
            },
            "slow": {
                **job_config(directory),
                "settings": {"pause_s": SLOW_S, "orders": str(directory)},
            },
            "short": merged(job, {"workers": {"min": 2, "max": 2}, "steps": 20}),
        },
    )


@pytest.fixture(autouse=True)
def no_job_is_left(jobs: JobFile) -> Iterator[None]:
    yield
    stop_what_runs(jobs)


def replica(live: LiveCluster, name: str, node: str = "", cpus: int = 1) -> AbstractContextManager[None]:
    """Until it ends, hold a lease like that of a replica, from when it has a place."""
    return live.running(REPLICA.format(name=name, node=node, cpus=cpus), "has a place")


def at_world_size(run: Path, size: int) -> dict[str, Any]:
    """Wait until steps are done by so many ranks."""
    return wait_until(
        lambda: next((line for line in reversed(metrics(run)) if line["world_size"] == size), None),
        f"a step of {size} workers in {run.name}",
    )


def grown_beyond(run: Path, step: int, size: int) -> None:
    wait_until(
        lambda: any(line["step"] > step and line["world_size"] == size for line in metrics(run)),
        f"a step of {size} workers after step {step}",
    )


def stop(jobs: JobFile, run: Path) -> list[dict[str, Any]]:
    """Stop a job; its metrics, in which every step stands once."""
    assert jobs.shoal("stop", run.name).returncode == 0
    assert finished(run)["status"] == "stopped"
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return lines


def shrink_and_grow(jobs: JobFile, name: str) -> tuple[Path, Path]:
    """Run a job that gives a worker to another one, and takes it back; the directories of both."""
    run = jobs.submit(name)
    at_world_size(run, 3)
    short = jobs.submit("short")
    assert finished(short)["status"] == "succeeded"
    shrunk = at_world_size(run, 2)
    grown_beyond(run, shrunk["step"], 3)
    return run, short


def test_a_job_shrinks_for_another_ones_minimum_and_grows_again(jobs: JobFile) -> None:
    run, short = shrink_and_grow(jobs, "groups")
    lines = stop(jobs, run)
    assert {line["attempt"] for line in lines} == {1}
    left, joined = events(run, "resized")
    assert (len(left["left"]), left["lost"], len(joined["joined"])) == (1, [], 1)
    (leaving,) = events(run, "leaving")
    assert leaving["for_whom"] == [f"job/{short.name}"]


@pytest.mark.parametrize("name", ["pair", "whole-pair"])
def test_a_minimum_moves_out_of_the_way_of_a_replica_and_loses_no_step(
    jobs: JobFile, live: LiveCluster, name: str
) -> None:
    with replica(live, "one", "worker-2"):
        with replica(live, "another", "worker-2"):
            run = jobs.submit(name)
            at_world_size(run, 2)
        assert {rank["node"] for event in events(run, "started") for rank in event["ranks"]} == {"worker-1"}
        with replica(live, "large", cpus=2):
            shrunk = at_world_size(run, 1)
            moved = events(run, "started")[-1]
            assert [rank["node"] for rank in moved["ranks"]] == ["worker-2"]
            if name == "pair":
                joined, left = events(run, "resized")[-2:]
                assert joined["joined"] == [moved["group"]], "a group is there before the last one leaves"
                assert len(left["left"]) == 1
        grown_beyond(run, shrunk["step"], 2)
    lines = stop(jobs, run)
    assert {line["attempt"] for line in lines} == ({1} if name == "pair" else {1, 2, 3})
    assert events(run, "failed") == []


def test_a_killed_rank_costs_the_others_less_than_a_heartbeat_timeout_and_comes_back(
    jobs: JobFile, live: LiveCluster
) -> None:
    run = jobs.submit("groups")
    at_world_size(run, 3)
    victim = events(run, "started")[-1]["ranks"][0]["pid"]
    psutil.Process(victim).kill()
    lost = wait_until(lambda: events(run, "resized"), "the loss of a group")[0]
    grown_beyond(run, lost["step"], 3)
    lines = stop(jobs, run)
    assert {line["attempt"] for line in lines} == {1}
    (failure,) = events(run, "failed")
    assert (failure["failure_class"], failure["group"]) == ("worker", lost["lost"][0])
    usual = statistics.median(line["step_s"] for line in lines)
    assert lines[lost["step"]]["step_s"] < usual + RecoveryConfig().heartbeat_timeout_s


def test_a_killed_store_of_the_groups_costs_no_step_and_those_that_come_have_another(
    jobs: JobFile, live: LiveCluster
) -> None:
    run = jobs.submit("groups")
    at_world_size(run, 3)
    (store,) = live.processes("shoal::Store")
    store.kill()
    another = wait_until(lambda: live.processes("shoal::Store"), "another store")
    assert store.pid not in [each.pid for each in another]
    psutil.Process(events(run, "started")[-1]["ranks"][0]["pid"]).kill()
    lost = wait_until(lambda: events(run, "resized"), "the loss of a group")[0]
    grown_beyond(run, lost["step"], 3)
    lines = stop(jobs, run)
    assert {line["attempt"] for line in lines} == {1}
    assert len(events(run, "failed")) == 1
    wait_until(lambda: not live.processes("shoal::Store"), "the end of the store")


def workers_on(live: LiveCluster, title: str, node: str) -> list[psutil.Process]:
    """The processes of Ray's on a node that are called like this."""
    return [each for each in live.processes(f"ray::{title}") if each.environ().get(NODE_NAME) == node]


def a_group_alone(run: Path) -> str:
    """The node that has one group of a job of three."""
    groups = Counter(event["ranks"][0]["node"] for event in events(run, "started"))
    assert sorted(groups.values()) == [1, 2]
    return min(groups, key=lambda node: groups[node])


def test_a_group_comes_back_with_the_workers_that_it_had(jobs: JobFile, live: LiveCluster) -> None:
    run = jobs.submit("groups")
    at_world_size(run, 3)
    node = a_group_alone(run)
    with replica(live, "large", node, cpus=2):
        shrunk = at_world_size(run, 2)
        before = workers_on(live, "RayTrainWorker", node)
        assert len(before) == 1, "it has no device, and waits"
    grown_beyond(run, shrunk["step"], 3)
    assert workers_on(live, "RayTrainWorker", node) == before
    stop(jobs, run)
    assert events(run, "failed") == []


@pytest.mark.parametrize("title", ["RayTrainWorker", "GroupRunner", "JobAgent"])
def test_what_waits_for_devices_and_is_killed_is_started_anew_when_there_are_some(
    jobs: JobFile, live: LiveCluster, title: str
) -> None:
    run = jobs.submit("groups")
    at_world_size(run, 3)
    node = a_group_alone(run)
    with replica(live, "large", node, cpus=2):
        shrunk = at_world_size(run, 2)
        (victim,) = workers_on(live, title, node)
        victim.kill()
        time.sleep(2.0)  # who has waited with it has seen it
    grown_beyond(run, shrunk["step"], 3)
    stop(jobs, run)
    assert events(run, "failed") == [], "nothing of the job was lost"


def test_a_group_that_dies_as_it_starts_is_tried_less_and_less_often_while_others_step(
    jobs: JobFile,
) -> None:
    run = jobs.submit("fragile")
    at_world_size(run, 3)
    (fatal := jobs.path.with_name(FATAL)).touch()
    psutil.Process(events(run, "started")[-1]["ranks"][0]["pid"]).kill()
    wait_until(lambda: len(events(run, "failed")) >= 7, "six failures of a group that starts")
    fatal.unlink()
    grown_beyond(run, metrics(run)[-1]["step"], 3)
    stop(jobs, run)
    failures = events(run, "failed")
    assert all(each["goes_on"] and each["failure_class"] == "worker" for each in failures)
    times = [datetime.fromisoformat(each["time"]) for each in failures]
    pauses = [(after - before).total_seconds() for before, after in pairwise(times)]
    assert pauses[5] > pauses[0] + 2.0, "4 to 8 s, and none at first"


def test_a_group_that_does_not_leave_in_time_is_taken_down(jobs: JobFile) -> None:
    run = jobs.submit("groups")
    at_world_size(run, 3)
    ranks = [psutil.Process(started["ranks"][0]["pid"]) for started in events(run, "started")]
    for rank in ranks:
        rank.suspend()
    short = jobs.submit("short")
    wait_until(lambda: events(run, "reclaimed"), "the end of a group that does not move")
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):  # of that group
            rank.resume()
    assert finished(short)["status"] == "succeeded"
    stop(jobs, run)


def test_a_job_of_one_group_is_built_anew_with_every_grant_and_loses_no_step(jobs: JobFile) -> None:
    run, _ = shrink_and_grow(jobs, "whole")
    for title in ("SynchronizationActor", "_AutoscalingCoordinator"):
        assert jobs.live.processes(f"ray::{title}") == [], "ranks meet at an agent"
    lines = stop(jobs, run)
    assert [line["world_size"] for line in lines[:1] + lines[-1:]] == [3, 3]
    assert {"rebuilding", "checkpointed", "ended", "leased", "entered", "started"} <= {
        event["kind"] for event in events(run)
    }


def test_a_group_whose_new_devices_are_free_waits_for_the_end_of_the_one_before(
    jobs: JobFile, live: LiveCluster
) -> None:
    run = jobs.submit("slow")
    started = wait_until(lambda: events(run, "started"), "the start")[0]
    (node,) = {each["node"] for each in started["ranks"]}
    with replica(live, "stray", node):
        wait_until(lambda: len(events(run, "started")) == 2, "the group on another node")
    lines = stop(jobs, run)
    (ended,), (_, entered) = events(run, "ended"), events(run, "entered")
    assert node not in {each["node"] for each in events(run, "started")[1]["ranks"]}
    assert entered["time"] > ended["time"]
    assert sorted({line["attempt"] for line in lines}) == [1, 2]


def test_a_sigterm_costs_no_step(jobs: JobFile) -> None:
    run = jobs.submit("groups")
    at_world_size(run, 3)
    started = events(run, "started")[-1]
    psutil.Process(started["ranks"][0]["pid"]).terminate()
    left = wait_until(lambda: events(run, "resized"), "a group that leaves")[0]
    assert (left["left"], left["lost"]) == ([started["group"]], [])
    grown_beyond(run, left["step"], 3)
    stop(jobs, run)
    assert events(run, "failed") == []


def test_a_sigterm_to_a_rank_of_one_group_costs_no_step(jobs: JobFile) -> None:
    run = jobs.submit("whole")
    at_world_size(run, 3)
    psutil.Process(events(run, "started")[-1]["ranks"][1]["pid"]).terminate()
    wait_until(lambda: len(events(run, "started")) == 2, "the group built anew")
    lines = stop(jobs, run)
    assert {line["attempt"] for line in lines} <= {1, 2}
    assert events(run, "failed") == []


def test_groups_leave_a_node_that_is_drained_without_a_step_lost(jobs: JobFile, live: LiveCluster) -> None:
    run = jobs.submit("groups")
    at_world_size(run, 3)
    (drained,) = [node for node in live.record.nodes if node.name == "worker-2"]
    there = [event["group"] for event in events(run, "started") if event["ranks"][0]["node"] == "worker-2"]
    words = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    words += ["--deadline-remaining-seconds", "600"]
    drain = f"""
import ray, subprocess, sys
ray.init(log_to_driver=False)
[node] = [row["NodeID"] for row in ray.nodes() if row["NodeManagerAddress"] == "{drained.ip}"]
ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
sys.exit(subprocess.call([*ray_command, "drain-node", "--node-id", node, *{words}]))
"""
    done = live.python(drain)
    assert done.returncode == 0, done.stderr
    left = wait_until(lambda: events(run, "resized"), "groups that leave")[-1]
    assert set(left["left"]) <= set(there)
    wait_until(lambda: {g for e in events(run, "resized") for g in e["left"]} == set(there), "all of them")
    stop(jobs, run)
    assert events(run, "failed") == []
