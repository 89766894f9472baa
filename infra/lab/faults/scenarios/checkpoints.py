"""What happens to checkpoints, before a job has to go back to one."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

from infra.lab.bench.own_cluster import OwnJob
from infra.lab.faults import troubled_disk
from infra.lab.faults.fault_course import seconds
from infra.lab.faults.files import DAMAGES
from infra.lab.faults.laboratory import (
    EVERY_STEPS,
    HANG_TIMEOUT_S,
    VICTIM,
    Laboratory,
    wait_between_checkpoints,
)
from infra.lab.faults.processes import rank_process
from infra.lab.faults.scenario import ClusterUse, FaultOutcome, Scenario, Trial
from train_jobs.checkpoint.store import CheckpointStore, checkpoint_name
from train_jobs.spec import CHECKPOINTS


def damage_newest(how: str, lab: Laboratory, repeats: int) -> FaultOutcome:
    """Damage the newest checkpoint and kill a rank: the job goes on from the one before it."""
    job = lab.cluster.submit("whole")
    trials, wrong = [], []
    for _ in range(repeats):
        damaged: list[int] = []

        def strike(damaged: list[int] = damaged) -> None:
            store = CheckpointStore(job.run.child(CHECKPOINTS))
            newest = store.newest()
            assert newest is not None, "one was saved since the attempt began"
            damaged.append(newest)
            DAMAGES[how](Path(store.location(newest)))
            rank_process(job, VICTIM).kill()

        job.until(partial(has_saved_twice, job), "no two checkpoints were saved")
        trials.append(lab.trial(job, strike))
        wrong += _not_passed_over(job, how, damaged[0])
    return FaultOutcome(trials, wrong + lab.wrong(job))


def has_saved_twice(job: OwnJob) -> bool:
    """Whether this attempt has saved twice.

    So there is one to go back to behind the newest, and the next attempt begins farther on than this one:
    whoever fails at the same step again and again has to wait longer each time.
    """
    started = job.events("started")
    attempt = started[-1]["attempt"] if started else None
    return sum(event["attempt"] == attempt for event in job.events("checkpointed")) >= 2


def _not_passed_over(job: OwnJob, how: str, damaged: int) -> list[str]:
    """What is wrong with how a job took the damage of the checkpoint of this step."""
    found = []
    start = job.events("started")[-1]["step"]
    if start != damaged - EVERY_STEPS:
        found.append(f"it went on from step {start}, though the checkpoint before is {damaged - EVERY_STEPS}")
    told = damaged in [event["step"] for event in job.events("checkpoint_rejected")]
    if how != "deleted" and not told:
        found.append(f"nobody says that {checkpoint_name(damaged)} was {how}")
    return found


def keep_from_being_read(lab: Laboratory, repeats: int) -> FaultOutcome:
    """For a while, let the disk answer ESTALE to who reads a checkpoint; none may be taken for damaged."""
    directory = lab.directory / "stale"
    with (
        troubled_disk.troubled_disk(directory) as disk,
        lab.own_cluster(storage=str(disk.directory)) as cluster,
    ):
        recovery = {"hang_timeout_s": HANG_TIMEOUT_S, "transient_errors": 1000, "checkpoint_failures": 1000}
        job = cluster.submit("whole", {"recovery": recovery})
        trials, wrong = [], []
        for _ in range(repeats):
            newest: list[int] = []

            def strike(newest: list[int] = newest) -> None:
                step = CheckpointStore(job.run.child(CHECKPOINTS)).newest()
                assert step is not None, "one was saved since the attempt began"
                newest.append(step)
                disk.trouble("ESTALE", paths=f"{CHECKPOINTS}/{checkpoint_name(step)}/")
                rank_process(job, VICTIM).kill()
                threading.Timer(UNREADABLE_S, disk.mend).start()

            job.until(partial(has_saved_twice, job), "no two checkpoints were saved")
            trials.append(lab.trial(job, strike))
            start = job.events("started")[-1]["step"]
            if start != newest[0]:
                wrong.append(f"it went on from step {start}, though the checkpoint of {newest[0]} is good")
        wrong += [f"step {event['step']}: {event['reason']}" for event in job.events("checkpoint_rejected")]
        return FaultOutcome(trials, wrong + lab.wrong(job))


def spoil_all(lab: Laboratory, repeats: int) -> FaultOutcome:
    """Damage every checkpoint and kill a rank: until the job has ended, with a sentence."""
    trials, wrong = [], []
    for _ in range(repeats):
        job = lab.cluster.submit("whole")
        job.until(partial(has_saved_twice, job), "no two checkpoints were saved")
        wait_between_checkpoints(job)
        store = CheckpointStore(job.run.child(CHECKPOINTS))
        began = time.time()
        for step in store.steps():
            DAMAGES["truncated"](Path(store.location(step)))
        rank_process(job, VICTIM).kill()
        finished = job.until(partial(job.events, "finished"), "the job did not end")[0]
        last = max(event["step"] for event in job.events("started"))
        if finished["status"] != "failed" or "recovery.begin_anew" not in (finished["error"] or ""):
            wrong.append(f"the job has {finished['status']}, with the error {finished['error']!r}")
        if last != 0 or job.metrics()[-1]["attempt"] != 1:
            wrong.append("a step was done after the checkpoints were lost")
        wrong += lab.wrong(job)
        trials.append(Trial(seconds(finished) - began, "it has ended, with a sentence"))
    return FaultOutcome(trials, wrong)


UNREADABLE_S = 6.0
"""More than one attempt waits for a file."""

SCENARIOS = (
    *(
        Scenario(
            f"checkpoint-{how}",
            f"the newest checkpoint is {how}, then SIGKILL of a rank: the one before it is taken",
            partial(damage_newest, how),
        )
        for how in DAMAGES
    ),
    Scenario(
        "checkpoint-unreadable",
        f"SIGKILL of a rank, and for {UNREADABLE_S:g} s the disk answers ESTALE to who reads the newest"
        " checkpoint: it is taken all the same",
        keep_from_being_read,
        troubled_disk.missing,
        use=ClusterUse.OWN,
    ),
    Scenario(
        "all-checkpoints-bad",
        "all checkpoints are truncated, then SIGKILL of a rank: the job ends with a sentence",
        spoil_all,
    ),
)
