"""What the step loop needs of a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from train_jobs.data.source import Batch, Collate, Samples


@dataclass(frozen=True)
class Sums:
    """What a batch adds up to; the loop divides by the counts of all ranks.

    Attributes:
        loss: summed over all that counts, differentiable.
        count: how much counted, a number or a tensor of one, on any device; padding does not count.
        others: further sums, e.g. of right answers; their means are part of an evaluation.
    """

    loss: Tensor
    count: Tensor | float
    others: Mapping[str, Tensor | float] = field(default_factory=dict)

    def vector(self) -> Tensor:
        """Loss, count and the others, float64, where the loss is; without gradient."""
        values = (self.loss, self.count, *self.others.values())
        device = self.loss.device
        return torch.stack([torch.as_tensor(value).detach().to(device, torch.float64) for value in values])


class Task(Protocol):
    """What is trained; one object a rank."""

    unit: str
    """What is counted: `tokens` or `samples`."""

    builds_on_meta: bool
    """`build` works within `torch.device("meta")`, where it fills nothing: of a model that is sharded, rank 0
    alone then builds the weights."""

    @property
    def collate(self) -> Collate | None:
        """Makes a batch of samples; None where they are dicts of tensors, arrays or numbers, all alike."""

    @property
    def content(self) -> str | None:
        """A digest of what the samples are cut from; None where only the task knows."""

    def build(self) -> nn.Module:
        """The model with its initial weights, fp32, on the CPU; the same on every rank."""

    def samples(self, held_out: bool) -> Samples | Dataset[Any]:
        """The samples to train on, or those to evaluate on.

        A torch Dataset gives each sample as a dict of tensors, arrays or numbers; an IterableDataset is a
        stream of unknown length, which every rank reads and takes its part of.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """The loss of a batch, in training and in evaluation."""

    def export(self, weights: dict[str, Tensor], directory: Path) -> None:
        """Write the trained model; `weights` is its whole state dict, on the CPU."""
