"""What the strategies built on FSDP2's `fully_shard` have in common.

Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023. One unit a block:
its parameters are all-gathered before its forward and its backward, its gradients reduce-scattered after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from cluster.config.sections.parallel import Dtype
from cluster.config.sections.train import TrainJobConfig
from train_jobs.parallel.mesh import Mesh
from train_jobs.parallel.model import ParallelModel
from train_jobs.tasks.weights import DTYPES


class ShardedModel(ParallelModel):
    """Under FSDP2; parameters, gradients and optimizer state are DTensors, this rank's shards.

    Args:
        keep_gathered: parameters gathered in a step's first forward stay until its last backward.
        offloads: the shards lie in CPU memory, the device is a GPU.
    """

    def __init__(
        self, module: FSDPModule, mesh: Mesh, config: TrainJobConfig, keep_gathered: bool, offloads: bool
    ) -> None:
        assert isinstance(module, nn.Module)
        super().__init__(module, mesh)
        self.sharded = module
        self.offloads = offloads
        self.keep_gathered = keep_gathered
        self.reduce_every_micro_batch = config.parallel.fsdp.reduce_every_micro_batch

    @contextmanager
    def synchronize(self, last: bool) -> Iterator[None]:
        self.sharded.set_requires_gradient_sync(last or self.reduce_every_micro_batch)
        self.sharded.set_is_last_backward(last)
        if self.keep_gathered:
            self.sharded.set_reshard_after_backward(last)
        yield

    def take_weights(self, whole: nn.Module | None) -> None:
        """Fill a model that was built on device `meta`. Called by all ranks.

        Weights come one after the other: ranks that are not the first never hold more than their shards and
        one whole tensor.

        Args:
            whole: on rank 0, the same model with its initial weights, on the CPU; None elsewhere.
        """
        self.stepped.to_empty(device=torch.device("cpu") if self.offloads else self.mesh.device)
        weights = {} if whole is None else {**whole.state_dict()}  # a copy: it is changed
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.stepped, weights, options=options)
        # Not all buffers are part of a state dict, and those of an offloaded model are not offloaded.
        for path, buffer in [*self.stepped.named_buffers(remove_duplicate=False)]:
            value = (buffer if whole is None else whole.get_buffer(path)).to(self.mesh.device)
            dist.broadcast(value, src=0)
            module, _, name = path.rpartition(".")
            setattr(self.stepped.get_submodule(module), name, value)


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    config: TrainJobConfig,
    *,
    keep_gathered: bool = False,
) -> ShardedModel:
    """Shard a model over the data axes of the mesh, block by block: each moves to the device as it is cut.

    A model on device `meta` is cut there, and has to be given its weights afterwards.
    """
    offload = config.parallel.offloads and mesh.device.type == "cuda"
    policy: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    precision = mixed_precision(config)
    for unit in (*blocks, model):
        inner = unit is not model
        fully_shard(
            unit,
            mesh=mesh.sharding(),
            reshard_after_forward=not keep_gathered if inner else None,
            mp_policy=replace(precision, output_dtype=None) if inner else precision,
            offload_policy=policy,
        )
    assert isinstance(model, FSDPModule)
    parallel = ShardedModel(model, mesh, config, keep_gathered, offload)
    if config.parallel.offloads and not offload:
        parallel.notes.append(
            f"{config.parallel.strategy}: without a GPU there is nothing to offload from; parameters, "
            "gradients and optimizer state are in CPU memory as it is"
        )
    return parallel


def mixed_precision(config: TrainJobConfig) -> MixedPrecisionPolicy:
    """The job's precision, each part of it settable. The shards themselves stay fp32."""
    settings = config.parallel.fsdp
    param = settings.param_dtype or config.precision
    if param == "fp32" and settings.reduce_dtype is None and settings.output_dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[param],
        # A sum of bf16 or fp16 gradients would lose the small ones.
        reduce_dtype=DTYPES[settings.reduce_dtype or "fp32"],
        output_dtype=_dtype(settings.output_dtype),
    )


def _dtype(name: Dtype | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]
