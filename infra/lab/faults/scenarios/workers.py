"""What happens to ranks and to the processes that carry them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from cluster.state.connection import environment
from infra.lab.bench.own_cluster import OwnJob
from infra.lab.faults import memory, ray_train
from infra.lab.faults.fault_course import resumption_beyond, seconds
from infra.lab.faults.laboratory import (
    HANG_TIMEOUT_S,
    HEARTBEAT_TIMEOUT_S,
    OTHER_ORDER,
    VICTIM,
    Laboratory,
    finding,
    median_step_s,
)
from infra.lab.faults.processes import node_of, process_of, rank_process
from infra.lab.faults.scenario import FaultOutcome, Scenario, Trial
from infra.lab.faults.task import Order
from train_jobs.spec import LOGS

GROUPS = 3
_AFTER_S = 0.5
"""What the bar of a lost group allows beside the heartbeat timeout and a step."""


def kill_rank(lab: Laboratory, repeats: int) -> FaultOutcome:
    """SIGKILL of a rank of one group; its bar is Ray Train alone, measured before it on the same cluster."""
    alone = ray_train.measure({**os.environ, **environment(lab.cluster.record)}, repeats)
    lab.say(f"Ray Train alone, SIGKILL to the next step: {', '.join(f'{each:.1f} s' for each in alone)}")
    job = lab.cluster.submit("whole")
    trials = [lab.trial(job, lambda: rank_process(job, VICTIM).kill()) for _ in range(repeats)]
    return FaultOutcome(trials, lab.wrong(job), bar_s=sorted(alone)[len(alone) // 2])


def kill_group(lab: Laboratory, repeats: int) -> FaultOutcome:
    """SIGKILL of the rank of a replica group; the others go on without it, and it comes back."""
    job = lab.cluster.submit("groups")
    trials = []
    for _ in range(repeats):
        wait_for_groups(job)
        trials.append(lose_group(job, lambda: rank_process(job, 0).kill()))
    bar = HEARTBEAT_TIMEOUT_S + median_step_s(job) + _AFTER_S
    return FaultOutcome(trials, lab.wrong(job, OTHER_ORDER), bar_s=bar)


def kill_ray_train_worker(lab: Laboratory, repeats: int) -> FaultOutcome:
    job = lab.cluster.submit("whole")

    def kill() -> None:
        process_of(lab.cluster, "worker", node_of(job, VICTIM)).kill()

    return FaultOutcome([lab.trial(job, kill) for _ in range(repeats)], lab.wrong(job))


def stop_rank(lab: Laboratory, repeats: int) -> FaultOutcome:
    return _hangs(lab, repeats, lambda job: rank_process(job, VICTIM).send_signal(signal.SIGSTOP))


def wait_for_ever(lab: Laboratory, repeats: int) -> FaultOutcome:
    return _hangs(lab, repeats, lambda job: lab.order(VICTIM, Order.WAIT))


def call_a_collective_alone(lab: Laboratory, repeats: int) -> FaultOutcome:
    return _hangs(lab, repeats, lambda job: lab.order(VICTIM, Order.COLLECTIVE))


def _hangs(lab: Laboratory, repeats: int, cause: Callable[[OwnJob], object]) -> FaultOutcome:
    job = lab.cluster.submit("whole")
    trials, wrong = [], []
    for _ in range(repeats):
        trial = lab.trial(job, lambda: cause(job))
        attempt, rank = (job.events("failed")[-1][key] for key in ("attempt", "rank"))
        stacks = f"{LOGS}/attempt-{attempt}/rank-{rank}-of-{attempt}-0.stack"
        if not job.run.exists(stacks) or b"loop.py" not in job.run.read_bytes(stacks):
            wrong.append(f"{stacks} does not say where rank {rank} stood")
        if trial.found_s is None or trial.found_s > HANG_TIMEOUT_S:
            wrong.append(f"a hang was found after {trial.found_s} s; hang_timeout_s is {HANG_TIMEOUT_S}")
        trials.append(trial)
    return FaultOutcome(trials, wrong + lab.wrong(job))


def run_out_of_memory(lab: Laboratory, repeats: int) -> FaultOutcome:
    """A rank allocates up to a limit of its own, and gets an exception."""
    job = lab.cluster.submit("whole")
    trials = [lab.trial(job, lambda: lab.order(VICTIM, Order.LIMIT)) for _ in range(repeats)]
    return FaultOutcome(trials, lab.wrong(job))


def be_killed_for_memory(lab: Laboratory, repeats: int) -> FaultOutcome:
    """A rank allocates up to the limit of a control group, and the kernel kills it."""
    job = lab.cluster.submit("whole")
    trials = []
    for _ in range(repeats):
        with memory.limited() as limit:

            def fill(limit: memory.Limit = limit) -> None:
                limit.put(rank_process(job, VICTIM))
                lab.order(VICTIM, Order.FILL)

            trials.append(lab.trial(job, fill))
    return FaultOutcome(trials, lab.wrong(job))


def wait_for_groups(job: OwnJob, count: int = GROUPS) -> None:
    """Wait until so many groups step together, and have for a while."""

    def together() -> bool:
        lines = job.metrics()[-10:]
        return len(lines) == 10 and all(line["world_size"] == count for line in lines)

    job.until(together, f"{count} groups never stepped together")


def lose_group(job: OwnJob, cause: Callable[[], object]) -> Trial:
    """Do something that costs an elastic job a group; until the first step without it."""
    before, failures = len(job.events("resized")), len(job.events("failed"))
    node = node_of(job, 0)
    began = time.time()
    cause()
    lost = job.until(
        lambda: [each for each in job.events("resized")[before:] if each["lost"]], "no group was lost"
    )[0]
    went_on = job.until(lambda: resumption_beyond(job.metrics(), lost["step"]), "no step was done after it")
    failed = job.until(lambda: job.events("failed")[failures:], "nobody says what became of the group")[0]
    return Trial(
        seconds=went_on.time - began,
        state="its peers, at the same step",
        found_s=seconds(failed) - began,
        failure=finding(failed),
        node=node,
        repeated=went_on.repeated,
        lost=went_on.lost,
    )


SCENARIOS = (
    Scenario(
        "rank-killed",
        "SIGKILL of a rank of one group: the group starts again",
        kill_rank,
    ),
    Scenario(
        "group-killed",
        "SIGKILL of the rank of one of three replica groups: the others go on",
        kill_group,
    ),
    Scenario(
        "train-worker-killed",
        "SIGKILL of the Ray Train worker of a rank: the group starts again",
        kill_ray_train_worker,
    ),
    Scenario(
        "rank-stopped",
        f"SIGSTOP of a rank, with hang_timeout_s {HANG_TIMEOUT_S:g}: its stacks are kept",
        stop_rank,
    ),
    Scenario(
        "rank-waits",
        f"a rank waits for ever in its own code, with hang_timeout_s {HANG_TIMEOUT_S:g}",
        wait_for_ever,
    ),
    Scenario(
        "collective-hangs",
        f"a rank calls a collective that no other calls, with hang_timeout_s {HANG_TIMEOUT_S:g}",
        call_a_collective_alone,
    ),
    Scenario(
        "out-of-memory",
        "a rank's allocation is refused: the group starts again",
        run_out_of_memory,
    ),
    Scenario(
        "killed-for-memory",
        "the kernel kills a rank that has used up the memory of its control group",
        be_killed_for_memory,
        missing=memory.missing,
    ),
)
