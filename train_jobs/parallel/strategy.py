"""What the step loop needs of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Precision = Literal["fp32", "bf16"]


class Strategy(Protocol):
    """Spreads a model over a one-dimensional mesh of data-parallel ranks.

    A strategy averages gradients over the ranks, as torch's own do; the loop scales its loss for that.
    """

    def __init__(self, mesh: DeviceMesh, precision: Precision) -> None: ...

    def parallelize(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """The model to call; `blocks` are the units to shard by. The model's parameters may be replaced."""

    def synchronize(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward of one micro-batch: gradients travel only in the last of a step."""

    def autocast(self) -> AbstractContextManager[None]:
        """Around forward passes, in training and in evaluation."""
