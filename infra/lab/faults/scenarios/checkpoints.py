"""What happens to the newest checkpoint, before a job has to go back to it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from infra.lab.bench.own_cluster import OwnJob
from infra.lab.faults.files import DAMAGES
from infra.lab.faults.laboratory import EVERY_STEPS, VICTIM, Laboratory
from infra.lab.faults.processes import rank_process
from infra.lab.faults.scenario import FaultOutcome, Scenario
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


SCENARIOS = tuple(
    Scenario(
        f"checkpoint-{how}",
        f"the newest checkpoint is {how}, then SIGKILL of a rank: the one before it is taken",
        partial(damage_newest, how),
    )
    for how in DAMAGES
)
