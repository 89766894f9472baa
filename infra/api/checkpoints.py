"""The checkpoints of a job, as `shoal checkpoints` lists them."""

from __future__ import annotations

from typing import Any

from cluster.files.storage import Storage
from train_jobs.checkpoint.store import Checkpoint, CheckpointStore
from train_jobs.records.listing import find_job, run_of
from train_jobs.spec import CHECKPOINTS


def checkpoints_of(storage: Storage, job: str) -> dict[str, Any]:
    """The job's id, and its checkpoints, the oldest first.

    Args:
        storage: the cluster's.

    Raises:
        RequestError: there is no such job.
    """
    found = find_job(storage, job)
    store = CheckpointStore(run_of(storage, found).child(CHECKPOINTS))
    return {"job": found, "checkpoints": [_row(store, each) for each in store.all()]}


def _row(store: CheckpointStore, checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "step": checkpoint.step,
        "complete": checkpoint.complete,
        "size_bytes": manifest.size_bytes if manifest else None,
        "evaluation": checkpoint.evaluation,
        "damage": checkpoint.damage,
        "path": store.location(checkpoint.step),
    }
