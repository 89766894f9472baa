"""A model that a strategy has spread over the mesh, as the step loop uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn.modules.batchnorm import _BatchNorm

from cluster.config.sections.train import OptimizerConfig, TrainJobConfig
from train_jobs.data.source import Batch
from train_jobs.optimization.gradients import clip_factor, global_norm, scale_gradients
from train_jobs.optimization.loss_scale import LossScale
from train_jobs.optimization.optimizers import build_optimizer
from train_jobs.parallel.mesh import Mesh
from train_jobs.tasks.weights import DTYPES

if TYPE_CHECKING:
    from train_jobs.parallel.context import ContextParallelism

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_SETTINGS = "param_groups."


class ParallelModel:
    """A model as one rank holds it; strategies derive theirs from this one, which is spread over nothing.

    The loop scales its loss for what the strategy does with gradients.

    Attributes:
        module: what is called in a forward pass.
        stepped: the module whose parameters the optimizer steps, and whose state is saved. Its parameters are
            named as the model's own were.
        mesh: where it is spread.
        context: how sequences are shared; None where each rank has its own.
        reduces: whether the strategy averages gradients over the data and context axes, as torch's own do;
            otherwise it leaves them to the exchange between replica groups.
        notes: what a user should know of how the strategy was carried out, as sentences.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, autocast: torch.dtype | None = None) -> None:
        self.module = module
        self.stepped = module
        self.mesh = mesh
        self.reduces = True
        self.notes: list[str] = []
        self.context: ContextParallelism | None = None
        self._autocast = autocast

    @property
    def num_averaged(self) -> int:
        """Ranks over which the strategy averages gradients."""
        return self.mesh.shape.num_averaged if self.reduces else 1

    @contextmanager
    def micro_batch(self, batch: Batch, last: bool = True) -> Iterator[Batch]:
        """Around forward and backward of one micro-batch.

        Args:
            batch: the samples of this rank's place on the data axes.
            last: gradients travel in the last micro-batch of a step only.

        Yields:
            what of the batch is this rank's: a part of every sequence, under context parallelism.
        """
        with self.synchronize(last):
            if self.context is None:
                yield batch
            else:
                with self.context.share(batch) as mine:
                    yield mine

    @contextmanager
    def synchronize(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: gradients travel if it is the last of a step."""
        yield

    def autocast(self) -> AbstractContextManager[Any]:
        """Around forward passes, in training and in evaluation."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.mesh.device.type, dtype=self._autocast)

    def optimizer(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        """What steps the parameters of `stepped`."""
        return build_optimizer(self.stepped, config)

    def loss_scale(self, config: TrainJobConfig) -> LossScale:
        return LossScale(config.precision == "fp16")

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss, already scaled."""
        loss.backward()

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        factor: float,
        max_norm: float | None,
        before_change: Callable[[], None],
    ) -> float:
        """Step by the gradients, clipped to a global norm; nothing changes where that norm is not finite.

        Args:
            factor: what makes of what backward has added the gradient of the global batch.
            max_norm: None clips nothing.
            before_change: called right before parameters and optimizer state change.

        Returns:
            the norm of the global batch's gradient before it was clipped, the same on all ranks.
        """
        parameters = [*self.module.parameters()]
        norm = global_norm(parameters) * factor
        if math.isfinite(norm):
            scale_gradients(parameters, clip_factor(norm, max_norm) * factor)
            before_change()
            self.step(optimizer)
        return norm

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the parameters by their gradients."""
        optimizer.step()

    def drop_gradients(self) -> None:
        """Forget the gradients: the next backward begins anew."""
        self.module.zero_grad(set_to_none=True)

    def agree_on_statistics(self) -> None:
        """Take rank 0's batch statistics: what is evaluated and saved must not depend on the rank."""
        for module in self.module.modules():
            if isinstance(module, _BatchNorm):
                for buffer in module.buffers(recurse=False):
                    dist.broadcast(buffer, src=0)

    def parameters_changed(self) -> None:
        """The parameters of `stepped` were loaded: copies of them have to follow."""

    def state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Model and optimizer state under the model's own names; tensors are the real ones, not copies.

        What the optimizer was told (its settings) is the config's, not part of it.
        """
        fresh = not optimizer.state
        model, state = get_state_dict(self.stepped, optimizer, options=_FLAT)
        if fresh:
            _undo_step(optimizer)
        return model, {key: value for key, value in state.items() if not key.startswith(_SETTINGS)}

    def state_to_load(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """What of `state` a checkpoint is to fill: all that may be kept of any parameter, begun anew.

        An optimizer keeps nothing of a parameter that got no gradient yet. What it is filled from may have
        something of it; or has nothing, and then what this one has is of steps that do not count any more.
        """
        self.drop_gradients()  # torch does not learn what is kept where there are any
        optimizer.state.clear()
        return self.state(optimizer)

    def load_state(
        self, optimizer: torch.optim.Optimizer, model: dict[str, Any], state: dict[str, Any]
    ) -> None:
        """Take what `state` gave, with other values in it."""
        _, current = get_state_dict(self.stepped, optimizer, options=_FLAT)
        settings = {key: value for key, value in current.items() if key.startswith(_SETTINGS)}
        set_state_dict(
            self.stepped,
            optimizer,
            model_state_dict=model,
            optim_state_dict={**settings, **state},
            options=_FLAT,
        )
        self.parameters_changed()

    def whole_model(self) -> dict[str, Tensor]:
        """The whole model's state dict on the CPU of rank 0; empty on the others. Called by all ranks."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.stepped, options=options)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def own_state(self) -> dict[str, Any]:
        """What this rank has to find again after a restart, beside parameters and optimizer state."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take what `own_state` gave, empty where this rank was not there; other ranks may have saved it."""


class Parallelize(Protocol):
    """What carries out a strategy."""

    def __call__(
        self, model: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, config: TrainJobConfig
    ) -> ParallelModel:
        """Spread a model over the mesh; its parameters may be replaced.

        Args:
            model: on the CPU; or on device `meta`, for strategies that shard.
            blocks: the units to shard by, e.g. the layers of a transformer.
        """


@torch.no_grad()
def _undo_step(optimizer: torch.optim.Optimizer) -> None:
    """Torch has an optimizer that keeps nothing yet step once by zeros, to learn what it will keep.

    That must not count as a step: zeros are what all of ours begin with.
    """
    for kept in optimizer.state.values():
        for value in kept.values():
            if isinstance(value, Tensor):
                value.zero_()


def autocast_dtype(config: TrainJobConfig) -> torch.dtype | None:
    """What forward passes are cast to where parameters stay fp32; None for no casting."""
    return None if config.precision == "fp32" else DTYPES[config.precision]
