"""What happens to the storage, while a job steps and saves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from infra.lab.bench.own_cluster import OwnJob
from infra.lab.faults import disks, troubled_disk
from infra.lab.faults.disks import Disk
from infra.lab.faults.fault_course import longest_gap_s, seconds
from infra.lab.faults.laboratory import HANG_TIMEOUT_S, Laboratory, wait_between_checkpoints
from infra.lab.faults.scenario import ClusterUse, FaultOutcome, Scenario, Trial
from train_jobs.checkpoint.store import CheckpointStore
from train_jobs.spec import CHECKPOINTS

_SHORT_S = 10.0
_HANG_S = 75.0
"""Longer than a rank waits for an answer."""
_MINUTE_S = 60.0
_HALF_A_CHECKPOINT_BYTES = 80 * 1024
_GOES_ON_S = 2.0
"""What a step may take longer than usual where it waits for a save that fails."""


def fill_up(lab: Laboratory, repeats: int) -> FaultOutcome:
    return _trouble(lab, repeats, _SHORT_S, Disk.fill, Disk.empty, "space")


def fill_up_in_a_checkpoint(lab: Laboratory, repeats: int) -> FaultOutcome:
    def fill(disk: Disk) -> None:
        disk.fill(_HALF_A_CHECKPOINT_BYTES)

    return _trouble(lab, repeats, _SHORT_S, fill, Disk.empty, "space")


def refuse_writes(lab: Laboratory, repeats: int) -> FaultOutcome:
    return _trouble(lab, repeats, _SHORT_S, Disk.refuse_writes, Disk.take_writes, "read-only")


def be_away(lab: Laboratory, repeats: int) -> FaultOutcome:
    return _trouble(lab, repeats, _MINUTE_S, Disk.take_away, Disk.bring_back, "read-only")


def _trouble(
    lab: Laboratory,
    repeats: int,
    for_s: float,
    strike: Callable[[Disk], None],
    mend: Callable[[Disk], None],
    reason: str,
) -> FaultOutcome:
    """Give the storage trouble for a while; the job must step on, and save once it is over.

    Args:
        reason: what the job must say of the saves that fail.
    """
    with disks.disk(lab.directory / "disk") as disk, lab.own_cluster(storage=str(disk.directory)) as cluster:
        recovery = {"hang_timeout_s": HANG_TIMEOUT_S, "checkpoint_failures": 1000}
        job = cluster.submit("whole", {"recovery": recovery})
        trials, wrong = [], []
        for _ in range(repeats):
            wait_between_checkpoints(job)
            began = time.time()
            strike(disk)
            threading.Event().wait(for_s)
            mend(disk)
            over = time.time()
            saved = job.until(lambda over=over: _since(job, "checkpointed", over), "nothing was saved")[0]  # type: ignore[misc]
            job.until_steps(1)
            stood = longest_gap_s(job.metrics(), began)
            failed = _since(job, "checkpoint_failed", began)
            if not failed:
                wrong.append("no checkpoint failed to be saved")
            wrong += [
                f"a save failed for another reason: {event['reason']}"
                for event in failed
                if reason not in event["reason"].lower()
            ]
            if stood > _GOES_ON_S:
                wrong.append(f"the job stood still for {stood:.1f} s")
            trials.append(_trial(job, stood, began, over, seconds(saved)))
        left = [each.step for each in CheckpointStore(job.run.child(CHECKPOINTS)).all() if each.unfinished]
        if left:
            wrong.append(f"halves of the checkpoints {left} are left")
        return FaultOutcome(trials, [*wrong, *_failures(job), *lab.wrong(job)])


def hang(lab: Laboratory, repeats: int) -> FaultOutcome:
    """Let the disk answer nothing for a while: until the next step, once it answers again."""
    with (
        troubled_disk.troubled_disk(lab.directory / "hanging") as disk,
        lab.own_cluster(storage=str(disk.directory)) as cluster,
    ):
        job = cluster.submit("whole")
        trials = []
        for _ in range(repeats):
            wait_between_checkpoints(job)
            disk.trouble(troubled_disk.HANG)
            threading.Event().wait(_HANG_S)
            disk.mend()
            over = time.time()

            def later(over: float = over) -> list[dict[str, Any]]:
                # Lines of steps that were done while the disk hung are written first.
                return [line for line in job.metrics() if seconds(line) > over]

            after = job.until(later, "no step was done once the disk answered again")
            stood = longest_gap_s(job.metrics(), over - _HANG_S)
            seen = f"it stood for {stood:.1f} of the {_HANG_S:.0f} s"
            trials.append(Trial(seconds(after[0]) - over, "where it was", seen=seen))
        return FaultOutcome(trials, [*_failures(job), *lab.wrong(job)])


def _trial(job: OwnJob, stood: float, began: float, over: float, saved: float) -> Trial:
    failed = _since(job, "checkpoint_failed", began)
    return Trial(
        stood,
        "where it was",
        found_s=seconds(failed[0]) - began if failed else None,
        seen=f"{len(failed)} saves failed; one succeeded {saved - over:.1f} s after the storage came back",
    )


def _since(job: OwnJob, kind: str, moment: float) -> list[dict[str, Any]]:
    return [event for event in job.events(kind) if seconds(event) > moment]


def _failures(job: OwnJob) -> list[str]:
    return [f"attempt {event['attempt']} failed: {event['reason']}" for event in job.events("failed")]


SCENARIOS = tuple(
    Scenario(name, f"{what}; the job steps on and keeps its logs", run, disks.missing, use=ClusterUse.OWN)
    for name, what, run in (
        ("disk-full", f"the storage has no room for {_SHORT_S:.0f} s", fill_up),
        (
            "disk-full-in-checkpoint",
            f"for {_SHORT_S:.0f} s there is room for half a checkpoint",
            fill_up_in_a_checkpoint,
        ),
        ("storage-read-only", f"the storage refuses writes for {_SHORT_S:.0f} s", refuse_writes),
        ("storage-away", f"the storage is away for {_MINUTE_S:.0f} s", be_away),
    )
)
SCENARIOS += (
    Scenario(
        "storage-hangs",
        f"the storage answers nothing for {_HANG_S:.0f} s: the job waits with its checkpoint, and goes on",
        hang,
        troubled_disk.missing,
        use=ClusterUse.OWN,
    ),
)
