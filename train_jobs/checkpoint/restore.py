"""Finding the newest checkpoint that is as it was written, and loading it on all ranks alike."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from train_jobs.checkpoint.files import CheckpointReader, damage
from train_jobs.checkpoint.saver import Events, first_line
from train_jobs.checkpoint.state import TrainingState
from train_jobs.checkpoint.store import Checkpoint, CheckpointStore, checkpoint_name
from train_jobs.errors import CheckpointError


def restore(
    store: CheckpointStore,
    state: TrainingState,
    event: Events,
    *,
    tidies: bool = True,
    before: int | None = None,
) -> int | None:
    """Load the newest good checkpoint; all ranks call this together.

    Every file is read and compared with the manifest first, each by one rank. A damaged checkpoint is
    marked and said with its damage, once, and the one before it is tried.

    Args:
        event: where rank 0 says what was not loaded, and why.
        tidies: clear away unfinished checkpoints and mark damaged ones.
        before: only checkpoints of fewer steps will do.

    Returns:
        the step that was loaded; None where there is no good checkpoint, and training begins anew.
    """
    coordinator = dist.get_rank() == 0
    candidates: list[Checkpoint] = []
    if coordinator:
        if tidies:
            store.drop_unfinished()
        candidates = [each for each in store.all() if before is None or each.step < before]
    while (checkpoint := _from_rank_0(candidates.pop() if candidates else None)) is not None:
        problem = checkpoint.damage or _damage(store, checkpoint)
        if problem is None:
            with store.reading(checkpoint.step) if coordinator else nullcontext():
                _load(store, state, checkpoint.step)
            return checkpoint.step
        if coordinator and tidies and not checkpoint.rejected:
            store.reject(checkpoint.step, problem)
            event("checkpoint_rejected", step=checkpoint.step, reason=problem)
    return None


def _load(store: CheckpointStore, state: TrainingState, step: int) -> None:
    try:
        state.load(CheckpointReader(store.storage, checkpoint_name(step)))
    except CheckpointException as error:
        raise CheckpointError(
            f"the checkpoint of step {step} does not fit this job's model or optimizer: {first_line(error)}"
        ) from error


def _damage(store: CheckpointStore, checkpoint: Checkpoint) -> str | None:
    """What any rank found wrong in its share of the files."""
    assert checkpoint.manifest is not None
    part = (dist.get_rank(), dist.get_world_size())
    found = damage(store.storage, checkpoint_name(checkpoint.step), checkpoint.manifest, part)
    all_found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(all_found, found)
    return next((each for each in all_found if each is not None), None)


def _from_rank_0(checkpoint: Checkpoint | None) -> Checkpoint | None:
    value = [checkpoint]
    dist.broadcast_object_list(value)
    return value[0]
