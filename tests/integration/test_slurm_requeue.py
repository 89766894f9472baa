"""Batch jobs that come and go: requeues, the time limit, a loss of power; what ran goes on by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.files.storage import Storage
from infra.lab.hosts.host import Host
from infra.lab.hosts.lan import REPOSITORY
from infra.lab.hosts.slurm_site import SlurmSite
from tests import waiting
from tests.slurm_hosts import APP, JOB, SlurmUser, needs_slurm, slurm_site_of
from train_jobs.records.run_log import read_all_metrics, read_events

pytestmark = [needs_slurm, pytest.mark.slow, pytest.mark.timeout(1500)]

REQUEUES = 10
WAIT_S = 240.0
wait_for = partial(waiting.wait_for, timeout_s=WAIT_S)


@pytest.fixture
def user(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SlurmUser]:
    """Of a site with these settings, where a test names some."""
    tmp_path.chmod(0o755)
    with slurm_site_of(tmp_path, settings=getattr(request, "param", None)) as site:
        yield SlurmUser(site, tmp_path / "homes")


class Run:
    """A job of somebody's, watched by its files."""

    def __init__(self, user: SlurmUser, name: str) -> None:
        self.job = str(user.document("train", name, "--detach")["job"])
        self._storage = Storage(str(user.home / "storage")).child("jobs", self.job)

    def steps(self) -> list[int]:
        return [line["step"] for line in read_all_metrics(self._storage)]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self._storage) if event["kind"] == kind]

    def does(self, more: int) -> float:
        """Wait for so many steps more."""
        before = len(self.steps())
        return wait_for(lambda: len(self.steps()) >= before + more, f"{self.job} does no steps")


def state_of(user: SlurmUser) -> str:
    return user.slurm("squeue", "--noheader", "--format=%T").strip()


def start_now(user: SlurmUser, number: str) -> None:
    """Let a job that was requeued start without the two minutes that Slurm has it wait."""
    wait_for(lambda: state_of(user) == "PENDING", "it does not come back into the queue")
    # Not at once: what Slurm's nodes took back of the run before, they take back by the second.
    user.slurm("scontrol", "update", f"JobId={number}", "StartTime=now+5")


def number_of(user: SlurmUser) -> str:
    return user.slurm("squeue", "--noheader", "--format=%i").strip()


def left_on(site: SlurmSite) -> set[str]:
    """What runs on its nodes and is not Slurm's."""
    return set().union(*(node.names() for node in site.nodes)) - {"munged", "slurmd"}


def apps_of(user: SlurmUser) -> list[tuple[str, str]]:
    return [(row["model"], row["status"]) for row in user.document("status")["apps"]]


def head_of(user: SlurmUser) -> Host:
    heads = [node["name"] for node in user.document("status")["nodes"] if node["head"]]
    return next(node for node in user.site.nodes if node.name == heads[0])


def test_ten_requeues_lose_and_repeat_no_step(user: SlurmUser) -> None:
    user.write(train_jobs={"lm": JOB, "short": {**JOB, "steps": 20}}, serve_apps=APP)
    assert user.shoal("up").returncode == 0
    assert user.shoal("train", "short", timeout_s=240).returncode == 0
    assert user.shoal("serve", timeout_s=240).returncode == 0
    number, run = number_of(user), Run(user, "lm")
    run.does(30)
    for turn in range(REQUEUES):
        if turn == 2:
            assert user.shoal("unserve", "chat").returncode == 0  # what is taken down stays so
        began = time.monotonic()
        if turn % 2:  # as before the time limit, and at a preemption
            user.slurm("scancel", "--batch", "--signal=TERM", number)
        else:
            user.slurm("scontrol", "requeue", number)
        start_now(user, number)
        gone_s = time.monotonic() - began
        done = run.steps()
        assert left_on(user.site) == set()
        wait_for(lambda: len(run.steps()) >= len(done) + 20, "the job does not go on")  # noqa: B023
        print(f"requeue {turn + 1}: gone after {gone_s:.1f} s, steps after {time.monotonic() - began:.1f} s")
        if turn == 1:
            wait_for(lambda: apps_of(user) == [("small@1", "running")], "the app does not come back")
    assert apps_of(user) == []
    assert user.shoal("stop", run.job).returncode == 0
    steps = run.steps()
    print(f"{len(steps)} steps over {REQUEUES} requeues")
    assert steps == list(range(1, len(steps) + 1)), "a step was lost, or done twice"
    assert len(run.events("submitted")) == REQUEUES + 1
    # One that somebody has stopped stays so.
    user.slurm("scontrol", "requeue", number)
    start_now(user, number)
    wait_for(lambda: user.shoal("status").returncode == 0, "the cluster does not come back")
    assert {row["status"] for row in user.document("jobs")} == {"stopped", "succeeded"}
    assert user.document("down")["stopped"]
    assert left_on(user.site) == set()


def test_the_time_limit_is_a_notice_to_leave(user: SlurmUser) -> None:
    slurm = {"nodes": 2, "cpus_per_node": 2, "time": 3, "notice_s": 60}
    user.write({"slurm": slurm}, train_jobs={"lm": JOB})
    assert user.shoal("up").returncode == 0
    number, run = number_of(user), Run(user, "lm")
    run.does(30)
    start_now(user, number)
    told = user.state().joinpath("told.jsonl").read_text()
    assert "there is notice to leave: jobs save, requests are finished" in told
    assert f"Slurm's job {number} goes back into the queue" in told
    run.does(30)
    steps = run.steps()
    assert steps == list(range(1, len(steps) + 1))
    assert user.document("down")["stopped"]


# A host that is back after that is no node of the job's any more.
@pytest.mark.parametrize("user", [{"SlurmdTimeout": "60"}], indirect=True)
def test_a_loss_of_power_is_got_over(user: SlurmUser) -> None:
    user.write(
        train_jobs={"lm": {**JOB, "checkpoint": {"every_steps": 20}}, "short": {**JOB, "steps": 20}},
        serve_apps=APP,
    )
    assert user.shoal("up").returncode == 0
    assert user.shoal("train", "short", timeout_s=240).returncode == 0
    assert user.shoal("serve", timeout_s=240).returncode == 0
    number, run = number_of(user), Run(user, "lm")
    run.does(60)
    head = head_of(user)
    (other,) = [node for node in user.site.nodes[:2] if node is not head]
    began = time.monotonic()
    other.cut_power()
    run.does(40)
    print(f"{other.name} lost its power: steps go on after {time.monotonic() - began:.1f} s")
    assert number_of(user) == number
    user.site.boot_node(other)

    def is_back() -> bool:
        nodes = {node["name"]: node["alive"] for node in user.document("status")["nodes"]}
        return nodes.get(other.name) is True

    began = time.monotonic()
    wait_for(is_back, f"{other.name} is no node again")
    print(f"{other.name} is a node again after {time.monotonic() - began:.1f} s")
    done = len(run.steps())
    began = time.monotonic()
    head.cut_power()
    start_now(user, number)
    wait_for(lambda: len(run.steps()) >= done + 40, "the job does not go on")
    print(f"{head.name}, the head, lost its power: steps go on after {time.monotonic() - began:.1f} s")
    assert head_of(user) is not head
    wait_for(lambda: apps_of(user) == [("small@1", "running")], "the app does not come back")
    print(f"the app answers again after {time.monotonic() - began:.1f} s")
    steps = set(run.steps())
    assert steps == set(range(1, max(steps) + 1)), "a step was lost"
    user.site.boot_node(head)
    assert user.document("down")["stopped"]
    assert left_on(user.site) == set()


def test_a_loss_of_all_nodes_is_got_over_with_the_next_up(user: SlurmUser) -> None:
    user.write(train_jobs={"lm": {**JOB, "checkpoint": {"every_steps": 20}}})
    assert user.shoal("up").returncode == 0
    number, run = number_of(user), Run(user, "lm")
    run.does(60)
    head = head_of(user)
    (other,) = [node for node in user.site.nodes[:2] if node is not head]
    # Slurm misses the head, and not the other, which is back before; no process of the cluster is.
    head.cut_power()
    other.cut_power()
    user.site.boot_node(other)
    nodes = ("squeue", "--noheader", "--format=%N")
    wait_for(lambda: user.slurm(*nodes).strip() == other.name, "Slurm does not take the head from the job")
    assert state_of(user) == "RUNNING"
    done, began = len(run.steps()), time.monotonic()
    with (user.home / "said").open("w") as said:
        up = user.site.login.start(
            *user.command("up"), environment={"PYTHONPATH": str(REPOSITORY)}, user=user.name, output=said
        )
        start_now(user, number)
        print(f"in the queue again after {time.monotonic() - began:.1f} s")
        assert up.wait(WAIT_S) == 0, (user.home / "said").read_text()
    assert (
        f"has lost {head.name}, its head, and nothing runs on {other.name}"
        in (user.home / "said").read_text()
    )
    wait_for(lambda: len(run.steps()) >= done + 40, "the job does not go on")
    print(f"steps go on {time.monotonic() - began:.1f} s after `up`")
    steps = set(run.steps())
    assert steps == set(range(1, max(steps) + 1)), "a step was lost"
    user.site.boot_node(head)
    assert user.document("down")["stopped"]
    assert left_on(user.site) == set()
