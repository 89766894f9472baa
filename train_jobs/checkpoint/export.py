"""A checkpoint as a model directory: what `shoal export` leaves, for any checkpoint of any strategy."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from cluster.config.models.model_memory import show_gib
from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError, ShoalError
from cluster.files.local_copy import files_here
from cluster.files.storage import Storage
from train_jobs.checkpoint.files import CheckpointReader, damage
from train_jobs.checkpoint.saver import cause
from train_jobs.checkpoint.store import CheckpointStore, checkpoint_name
from train_jobs.data.growing_array import ARRAY
from train_jobs.errors import CheckpointError
from train_jobs.spec import CHECKPOINTS, DATA
from train_jobs.tasks import Task, make_task
from train_jobs.tasks.weights import export_dtype


def export_checkpoint(run: Storage, config: TrainJobConfig, step: int | None, directory: Path) -> int:
    """Write the model of a checkpoint as its task writes it, in one process and without a cluster.

    Args:
        run: the run's directory.
        step: None takes the newest.
        directory: must not be there yet; it is whole when it is.

    Returns:
        the step.

    Raises:
        RequestError: there is no such checkpoint, or the directory is there.
        CheckpointError: the checkpoint is damaged, or not of this config.
        ShoalError: there is no room for the model.
    """
    store = CheckpointStore(run.child(CHECKPOINTS))
    step = _choose(store, step)
    if directory.exists():
        raise RequestError(f"{directory} is there already; a model is written into a new directory")
    # The arrays of the samples are much, and no model needs them.
    with files_here(run.child(DATA), without=ARRAY) as data:
        task, weights = _load(store, step, config, data)
        if not config.is_custom:
            _check_room(weights, export_dtype(config), directory)
        beside = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
        try:
            task.export(weights, beside)
            beside.rename(directory)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return step


def _load(
    store: CheckpointStore, step: int, config: TrainJobConfig, data: Path
) -> tuple[Task, dict[str, Tensor]]:
    """The task, and the weights that its model had then."""
    with store.reading(step):
        manifest = store.look(step).manifest
        assert manifest is not None
        problem = damage(store.storage, checkpoint_name(step), manifest)
        if problem is not None:
            store.reject(step, problem)
            raise CheckpointError(f"the checkpoint of step {step} is damaged: {problem}")
        task = make_task(config, data)
        model = task.build()
        state = {"model": model.state_dict()}
        try:
            dcp.load(
                state, storage_reader=CheckpointReader(store.storage, checkpoint_name(step)), no_dist=True
            )
        except CheckpointException as error:
            raise CheckpointError(
                f"the checkpoint of step {step} is not one of this model: {cause(error)}"
            ) from error
    return task, {name: value for name, value in state["model"].items() if isinstance(value, Tensor)}


def _check_room(weights: Mapping[str, Tensor], dtype: torch.dtype, directory: Path) -> None:
    """See that the model does not fill the disk, which may be the memory of the machine."""
    whole = {tensor.data_ptr(): tensor for tensor in weights.values()}  # ties are written once
    needed = sum(
        tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize
        for tensor in whole.values()
    )
    above = next(each for each in directory.absolute().parents if each.exists())
    free = shutil.disk_usage(above).free
    if needed > free:
        raise ShoalError(f"the model takes {show_gib(needed)}; in {above} there is room for {show_gib(free)}")


def _choose(store: CheckpointStore, step: int | None) -> int:
    steps = store.steps()
    if not steps:
        raise RequestError(f"there is no complete checkpoint in {store.storage.location}")
    if step is None:
        return steps[-1]
    if step not in steps:
        problem = store.look(step).damage
        why = f"is damaged: {problem}" if problem else "is not there"
        raise RequestError(f"the checkpoint of step {step} {why}; there are {', '.join(map(str, steps))}")
    return step
