"""Finding the newest checkpoint that is as it was written, and loading it on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from cluster.files.backend import StorageError
from train_jobs.checkpoint.files import CheckpointReader, damage
from train_jobs.checkpoint.saver import Events, cause
from train_jobs.checkpoint.state import TrainingState
from train_jobs.checkpoint.store import Checkpoint, CheckpointStore, checkpoint_name
from train_jobs.errors import CheckpointError
from train_jobs.parallel.agreement import from_all, from_rank_0


def restore(
    store: CheckpointStore,
    state: TrainingState,
    event: Events,
    *,
    has_saved: Callable[[], bool],
    begin_anew: bool = False,
    tidies: bool = True,
    before: int | None = None,
) -> int | None:
    """Load the newest good checkpoint; all ranks call this together.

    Every file is read and compared with the manifest first, each by one rank. A damaged checkpoint is
    marked and said with its damage, once, and the one before it is tried. What cannot be read tells nothing
    of the files: it is no damage.

    Args:
        event: where rank 0 says what was not loaded, and why.
        has_saved: whether the job has ever saved a checkpoint, as its log tells.
        begin_anew: where checkpoints were saved and none can be loaded, begin at step 0.
        tidies: clear away unfinished checkpoints and mark damaged ones.
        before: only checkpoints of fewer steps will do.

    Returns:
        the step that was loaded; None where there is none, and training begins.

    Raises:
        StorageError: the storage does not answer.
        CheckpointError: none of those that were saved can be loaded, or one does not fit the job.
    """
    coordinator = dist.get_rank() == 0
    patient = state.parallel.mesh.patient
    candidates = from_rank_0(lambda: _candidates(store, before, tidies=tidies), patient)
    told: dict[int, str] = {}
    for checkpoint in reversed(candidates):
        problem = checkpoint.damage or _damage(store, checkpoint, patient)
        if problem is None:
            with store.reading(checkpoint.step) if coordinator else nullcontext():
                begun = _load(store, state, checkpoint.step)
            if coordinator and begun:
                event(
                    "optimizer_state_missing",
                    step=checkpoint.step,
                    parameters=len(begun),
                    reason="nothing that the optimizer keeps was saved of "
                    f"{', '.join(begun[:3])}{', …' if len(begun) > 3 else ''}; it begins anew",
                )
            if coordinator and state.other_samples:
                event(
                    "data_begun_anew",
                    step=checkpoint.step,
                    reason="the samples, or their order, are other ones than those that this checkpoint was"
                    " trained on: they begin with the first",
                )
            return checkpoint.step
        told[checkpoint.step] = problem
        if coordinator and tidies and not checkpoint.rejected:
            store.reject(checkpoint.step, problem)
            event("checkpoint_rejected", step=checkpoint.step, reason=problem)
    if before is None and from_rank_0(lambda: bool(told) or has_saved(), patient):
        lost = _nothing_left(store, told)
        if not begin_anew:
            raise CheckpointError(
                f"{lost}; the job stops rather than begin at step 0 again (recovery.begin_anew: true lets it)"
            )
        if coordinator and tidies:
            event("begun_anew", reason=lost)
    return None


def restore_best(store: CheckpointStore, state: TrainingState, ranked: Callable[[], list[int]]) -> int | None:
    """Load the best checkpoint that is as it was written; all ranks call this together.

    Args:
        ranked: the steps, the best first, as rank 0 finds them.

    Returns:
        its step; None where there is none.

    Raises:
        StorageError: the storage does not answer.
    """
    patient = state.parallel.mesh.patient
    for step in from_rank_0(ranked, patient):
        checkpoint = from_rank_0(partial(store.look, step), patient)
        if checkpoint.complete and _damage(store, checkpoint, patient) is None:
            with store.reading(step) if dist.get_rank() == 0 else nullcontext():
                _load(store, state, step)
            return step
    return None


def _candidates(store: CheckpointStore, before: int | None, *, tidies: bool) -> list[Checkpoint]:
    if tidies:
        store.drop_unfinished()
    found = [each for each in store.all() if not each.unfinished]
    return [each for each in found if before is None or each.step < before]


def _nothing_left(store: CheckpointStore, told: dict[int, str]) -> str:
    where = store.storage.location
    if not told:
        return f"this job has saved checkpoints, and there is none in {where}"
    step, problem = next(iter(told.items()))
    more = ", and so are all before it" if len(told) > 1 else ""
    return f"no checkpoint in {where} can be loaded: that of step {step} is damaged ({problem}){more}"


def _load(store: CheckpointStore, state: TrainingState, step: int) -> list[str]:
    """Fill the state; returns the parameters of which the optimizer had kept nothing."""
    try:
        return state.load(CheckpointReader(store.storage, checkpoint_name(step)))
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        unread = next((cause for cause in causes if isinstance(cause, (StorageError, OSError))), None)
        if unread is not None:
            raise StorageError(f"the checkpoint of step {step} cannot be read: {unread}") from error
        raise CheckpointError(
            f"the checkpoint of step {step} does not fit this job's model or optimizer: {cause(error)}"
        ) from error


def _damage(store: CheckpointStore, checkpoint: Checkpoint, patient: dist.ProcessGroup) -> str | None:
    """What any rank found wrong in its share of the files."""
    manifest, directory = checkpoint.manifest, checkpoint_name(checkpoint.step)
    assert manifest is not None
    part = (dist.get_rank(), dist.get_world_size())
    found = from_all(lambda: damage(store.storage, directory, manifest, part), patient)
    return next((each for each in found if each is not None), None)
