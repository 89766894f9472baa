"""ZeRO stage 1: parameters and gradients whole on every rank, optimizer state sharded.

DistributedDataParallel all-reduces the gradients; each rank's optimizer then steps its part of every
parameter, and the parts are all-gathered (Rajbhandari et al., SC 2020). The parts are views into the whole
parameters, cut along the first dim as FSDP2 cuts them, so that nothing is held twice and a checkpoint of
either is one of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cluster.config.sections.train import TrainJobConfig
from train_jobs.parallel.ddp import ReplicatedModel
from train_jobs.parallel.mesh import Mesh
from train_jobs.parallel.model import ParallelModel

BUCKET_ELEMENTS = 8 * 2**20
"""Parameters that are gathered together: few collectives, and a buffer that stays small."""


class ZeroModel(ReplicatedModel):
    """Under DistributedDataParallel, with `stepped` holding this rank's part of every parameter."""

    def __init__(self, model: nn.Module, mesh: Mesh, config: TrainJobConfig) -> None:
        super().__init__(model, mesh, config)
        # Every rank takes part, whatever its axis: over `cp` parameters are copies too.
        self.over = mesh.parameters["dp_replicate"]
        self.whole = [parameter for parameter in model.parameters() if parameter.requires_grad]
        parts = {parameter: self._part(parameter) for parameter in self.whole}
        self.parts = [parts[parameter] for parameter in self.whole]
        self.stepped = _mirror(model, parts)

    def _part(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(_as_shard(_own_rows(parameter.data, self.over), parameter, self.over))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, part in zip(self.whole, self.parts, strict=True):
            if parameter.grad is not None:
                part.grad = _as_shard(_own_rows(parameter.grad, self.over), parameter, self.over)
        optimizer.step()
        self.parameters_changed()

    @torch.no_grad()
    def parameters_changed(self) -> None:
        for bucket in _buckets(self.whole):
            self._gather(bucket)

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self.stepped.zero_grad(set_to_none=True)

    def _gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Fill up the rows that other ranks have stepped."""
        size, rank = self.over.size(), self.over.get_local_rank()
        rows = [_rows(parameter.shape, size) for parameter in parameters]
        lengths = [
            sum(_numel(p, each[r]) for p, each in zip(parameters, rows, strict=True)) for r in range(size)
        ]
        # Ranks hold unequally many rows; the collective wants equally long buffers.
        longest = max(lengths)
        own = parameters[0].new_zeros(longest)
        parts = [p.data[slice(*each[rank])].flatten() for p, each in zip(parameters, rows, strict=True)]
        torch.cat(parts, out=own[: lengths[rank]])
        gathered = own.new_empty(size * longest)
        dist.all_gather_single(gathered, own, group=self.over.get_group())
        for other in range(size):
            position = other * longest
            if other == rank:
                continue
            for parameter, each in zip(parameters, rows, strict=True):
                target = parameter.data[slice(*each[other])]
                target.copy_(gathered[position : position + target.numel()].view_as(target))
                position += target.numel()


def parallelize(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, config: TrainJobConfig
) -> ParallelModel:
    return ZeroModel(model, mesh, config)


def _rows(shape: Sequence[int], size: int) -> list[tuple[int, int]]:
    """First and last row (exclusive) of each rank, as torch.chunk and FSDP2 cut them."""
    each = -(-shape[0] // size)
    return [(min(rank * each, shape[0]), min((rank + 1) * each, shape[0])) for rank in range(size)]


def _numel(parameter: Tensor, rows: tuple[int, int]) -> int:
    return (rows[1] - rows[0]) * (parameter.numel() // max(1, parameter.shape[0]))


def _own_rows(tensor: Tensor, over: DeviceMesh) -> Tensor:
    return tensor[slice(*_rows(tensor.shape, over.size())[over.get_local_rank()])]


def _as_shard(own: Tensor, whole: Tensor, over: DeviceMesh) -> DTensor:
    return DTensor.from_local(
        own, over, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(p.numel() for p in bucket) + parameter.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _mirror(model: nn.Module, parts: dict[nn.Parameter, nn.Parameter]) -> nn.Module:
    """A tree of empty modules with the parts (and the model's own buffers) under the model's names."""
    mirror = nn.Module()

    def at(name: str) -> tuple[nn.Module, str]:
        module = mirror
        *path, leaf = name.split(".")
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            inner = module._modules[step]
            assert inner is not None
            module = inner
        return module, leaf

    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, leaf = at(name)
        module.register_parameter(leaf, parts.get(parameter, parameter))
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        module, leaf = at(name)
        module.register_buffer(leaf, buffer, persistent=name in saved)
    return mirror
