"""What the step loop needs of a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from train_jobs.parallel.model import Batch


@dataclass(frozen=True)
class Sums:
    """What a batch adds up to; the loop divides by the counts of all ranks.

    Attributes:
        loss: summed over all that counts, differentiable.
        count: how much counted; padding does not.
        others: further sums, e.g. of right answers; their means are part of an evaluation.
    """

    loss: Tensor
    count: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)


class Samples(Protocol):
    """The samples of one part of the data, by index."""

    @property
    def targets_per_sample(self) -> int:
        """How much counts in a whole sample: its tokens, or 1."""

    def __len__(self) -> int: ...

    def batch(self, indices: list[int]) -> dict[str, Any]:
        """The arrays or tensors of some samples; the first dim of each counts the samples."""

    def nothing(self) -> dict[str, Any]:
        """A batch of one sample of which nothing counts: for ranks that have none left."""


class Task(Protocol):
    """What is trained; one object a rank."""

    unit: str
    """What is counted: `tokens` or `samples`."""

    def build(self) -> nn.Module:
        """The model with its initial weights, fp32, on the CPU; the same on every rank."""

    def samples(self, held_out: bool) -> Samples:
        """The samples to train on, or those to evaluate on."""

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """The loss of a batch, in training and in evaluation."""

    def export(self, weights: dict[str, Tensor], directory: Path) -> None:
        """Write the trained model; `weights` is its whole state dict, on the CPU."""
