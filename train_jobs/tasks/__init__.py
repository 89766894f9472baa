"""What is trained: one file a task, one table from name to task."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from cluster.config.reading.custom_task import METHODS
from cluster.config.sections.parallel import Dtype
from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from train_jobs.data.source import Batch, Collate, Samples
from train_jobs.tasks.causal_lm import CausalLM
from train_jobs.tasks.image_classification import ImageClassification
from train_jobs.tasks.task import Sums, Task
from train_jobs.tasks.weights import DTYPES, cast, once

__all__ = ["TASKS", "Sums", "Task", "make_task"]

TASKS: dict[str, Callable[[TrainJobConfig, Path], Task]] = {
    "causal_lm": CausalLM,
    "image_classification": ImageClassification,
}
"""From the config's `task` to the class."""


def make_task(config: TrainJobConfig, data: Path) -> Task:
    """The task of a job.

    Args:
        data: the run's directory of prepared data.

    Raises:
        RequestError: the class of the user's cannot be imported, or lacks a method.
    """
    if not config.is_custom:
        return TASKS[config.task](config, data)
    module, _, name = config.task.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RequestError(f"task {config.task!r} cannot be imported: {error}") from error
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise RequestError(f"task {config.task!r} has no method {' and no '.join(missing)}")
    return CustomTask(found(config), config.export.precision)


class CustomTask:
    """A task of the user's, with what it may leave out."""

    def __init__(self, own: Any, precision: Dtype | None = None) -> None:
        self.own = own
        self.precision = precision
        self.unit: str = getattr(own, "unit", "samples")
        self.builds_on_meta: bool = getattr(own, "builds_on_meta", False)
        self.collate: Collate | None = getattr(own, "collate", None)
        self.content: str | None = getattr(own, "content", None)

    def __copy__(self) -> CustomTask:
        return CustomTask(copy.copy(self.own), self.precision)

    def build(self) -> nn.Module:
        return self.own.build()

    def samples(self, held_out: bool) -> Samples | Dataset[Any]:
        return self.own.samples(held_out)

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        return self.own.loss(model, batch)

    def export(self, weights: dict[str, Tensor], directory: Path) -> None:
        """As the task does it; else the whole state dict as `model.safetensors`, tied weights once."""
        if self.precision is not None:
            weights = cast(weights, DTYPES[self.precision])
        if hasattr(self.own, "export"):
            self.own.export(weights, directory)
        else:
            directory.mkdir(parents=True)
            kept, tied = once(weights)
            save_file(kept, directory / "model.safetensors", metadata=tied or None)
