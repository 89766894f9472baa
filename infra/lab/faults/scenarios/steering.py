"""What happens to the processes that steer a job and its cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from cluster.errors import ShoalError
from infra.lab.bench.own_cluster import OwnJob
from infra.lab.faults.fault_course import longest_gap_s, resumption
from infra.lab.faults.laboratory import (
    OTHER_ORDER,
    VICTIM,
    Laboratory,
    median_step_s,
    state_of,
    wait_between_checkpoints,
)
from infra.lab.faults.processes import node_of, process_of
from infra.lab.faults.scenario import FaultOutcome, Scenario, Trial
from infra.lab.faults.scenarios.workers import wait_for_groups
from infra.lab.faults.waiting import wait_for

_GOES_ON_S = 0.5
"""What a job that goes on may take longer for a step than it does else."""
_STEPS_AFTER = 40


def kill_controller(lab: Laboratory, repeats: int) -> FaultOutcome:
    return _goes_back(lab, repeats, lambda job: process_of(lab.cluster, "controller"))


def kill_fork_server(lab: Laboratory, repeats: int) -> FaultOutcome:
    return _goes_back(lab, repeats, lambda job: fork_server_of(lab, node_of(job, VICTIM)))


def fork_server_of(lab: Laboratory, node: str) -> psutil.Process:
    """The server itself; its forks have the same command line."""
    rank_or_server = process_of(lab.cluster, "fork server", node)
    for parent in rank_or_server.parents():
        if parent.cmdline() == rank_or_server.cmdline():
            return parent
    return rank_or_server


def _goes_back(lab: Laboratory, repeats: int, victim: Callable[[OwnJob], psutil.Process]) -> FaultOutcome:
    job = lab.cluster.submit("whole")
    trials = [lab.trial(job, lambda: victim(job).kill()) for _ in range(repeats)]
    return FaultOutcome(trials, lab.wrong(job))


def kill_broker(lab: Laboratory, repeats: int) -> FaultOutcome:
    """From the SIGKILL until a new broker knows of the job's lease; the job steps on meanwhile."""
    from cluster.sharing.client import BrokerClient

    job = lab.cluster.submit("whole")
    holder, trials, gaps = f"job/{job.job}", [], []

    def knows() -> bool:
        try:
            return any(lease["holder"] == holder and lease["granted"] for lease in BrokerClient().leases())
        except ShoalError:
            return False

    for _ in range(repeats):
        wait_between_checkpoints(job)
        broker = process_of(lab.cluster, "broker")
        began = time.time()
        broker.kill()
        wait_for(lambda broker=broker: not broker.is_running(), "the broker did not end")  # type: ignore[misc]
        wait_for(knows, "no broker knows of the lease")
        trials.append(Trial(time.time() - began, "where it was"))
        job.until_steps(_STEPS_AFTER)
        gaps.append(longest_gap_s(job.metrics(), began))
    return FaultOutcome(trials, [*_held_up(job, gaps), *lab.wrong(job)])


def kill_control(lab: Laboratory, repeats: int) -> FaultOutcome:
    """The actor that writes the logs of a job is killed: to the next step that is logged."""
    job = lab.cluster.submit("whole")
    trials = [_pause(lab, job, "control", wait_between_checkpoints) for _ in range(repeats)]
    # A line that was on its way then may be logged twice; that is no step done twice.
    return FaultOutcome(trials, lab.wrong(job, logged_twice=True))


def kill_lighthouse(lab: Laboratory, repeats: int) -> FaultOutcome:
    """Where replica groups agree on who takes part: no step counts until Ray has started it again."""
    job = lab.cluster.submit("groups")
    trials = [_pause(lab, job, "lighthouse", wait_for_groups) for _ in range(repeats)]
    return FaultOutcome(trials, [*_taken_for_lost(job), *lab.wrong(job, OTHER_ORDER)])


def kill_store(lab: Laboratory, repeats: int) -> FaultOutcome:
    """Where replica groups find one another when they become others: until another store is there."""
    job = lab.cluster.submit("groups")
    trials, gaps = [], []
    for _ in range(repeats):
        wait_for_groups(job)
        store = process_of(lab.cluster, "store")
        began = time.time()
        store.kill()
        wait_for(lambda store=store: _is_another(lab, store), "no other store was started")  # type: ignore[misc]
        trials.append(Trial(time.time() - began, "where it was"))
        job.until_steps(_STEPS_AFTER)
        gaps.append(longest_gap_s(job.metrics(), began))
    return FaultOutcome(trials, [*_held_up(job, gaps), *_taken_for_lost(job), *lab.wrong(job, OTHER_ORDER)])


def _is_another(lab: Laboratory, before: psutil.Process) -> bool:
    with suppress(ShoalError):
        return process_of(lab.cluster, "store").pid != before.pid
    return False


def _taken_for_lost(job: OwnJob) -> list[str]:
    changes = [event for event in job.events("resized") if event["lost"] or event["left"]]
    return [f"groups {event['lost']} were taken for lost" for event in changes]


def _pause(lab: Laboratory, job: OwnJob, role: str, wait: Callable[[OwnJob], None]) -> Trial:
    """How long a job logs no step after the SIGKILL of a process without which it goes on."""
    wait(job)
    began = time.time()
    process_of(lab.cluster, role).kill()
    job.until_steps(_STEPS_AFTER)
    return Trial(longest_gap_s(job.metrics(), began), "where it was")


def kill_driver(lab: Laboratory, repeats: int) -> FaultOutcome:
    """The job ends, Ray frees its devices, and `shoal resume` goes on: to the first step after that."""
    job = lab.cluster.submit("whole")
    trials = []
    for _ in range(repeats):
        wait_between_checkpoints(job)
        attempt = job.metrics()[-1]["attempt"]
        began = time.time()
        psutil.Process(job.events("preparing")[-1]["pid"]).kill()
        wait_for(lambda: job.status() == "failed", "nobody says that the job has failed")
        said = time.time() - began
        job.resume()
        went_on = job.until(
            lambda attempt=attempt: resumption(job.metrics(), attempt + 1),  # type: ignore[misc]
            "no step was done after it was resumed",
        )
        trials.append(
            Trial(
                went_on.time - began,
                state_of(job, went_on),
                found_s=said,
                repeated=went_on.repeated,
                lost=went_on.lost,
                seen="resumed by hand as soon as `shoal jobs` said failed",
            )
        )
    return FaultOutcome(trials, lab.wrong(job))


def _held_up(job: OwnJob, gaps: list[float]) -> list[str]:
    allowed = median_step_s(job) + _GOES_ON_S
    return [f"the job stood still for {gap:.2f} s" for gap in gaps if gap > allowed]


SCENARIOS = (
    Scenario(
        "controller-killed", "SIGKILL of Ray Train's controller: the group starts again", kill_controller
    ),
    Scenario(
        "fork-server-killed",
        "SIGKILL of the process whose forks a node's ranks are: the group starts again",
        kill_fork_server,
    ),
    Scenario(
        "control-killed",
        "SIGKILL of the actor that writes a job's logs: the job goes on, and no step is missing in them",
        kill_control,
    ),
    Scenario(
        "lighthouse-killed",
        "SIGKILL of the actor where replica groups agree on who takes part: they stand until it is back",
        kill_lighthouse,
    ),
    Scenario(
        "store-killed",
        "SIGKILL of the process by which replica groups find one another: they go on, and another is started",
        kill_store,
    ),
    Scenario(
        "broker-killed",
        "SIGKILL of the broker: the job goes on; until a new broker knows its lease",
        kill_broker,
    ),
    Scenario("driver-killed", "SIGKILL of a job's driver, then `shoal resume`", kill_driver),
)
