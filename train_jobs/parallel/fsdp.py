"""Fully sharded data parallelism: FSDP2's `fully_shard`, one unit a transformer block.

Parameters, gradients and optimizer state are sharded; a block's parameters are all-gathered just before its
forward and backward, its gradients reduce-scattered after backward (ZeRO stage 3; Rajbhandari et al.,
SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from train_jobs.parallel.strategy import Precision


class FSDP:
    """Shards parameters, gradients and optimizer state over all ranks."""

    def __init__(self, mesh: DeviceMesh, precision: Precision) -> None:
        self.mesh = mesh
        # Gradients are summed over the ranks in fp32: a bf16 sum would lose the small ones.
        self.policy = (
            MixedPrecisionPolicy()
            if precision == "fp32"
            else MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        )

    def parallelize(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        for block in blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=self.policy)
        fully_shard(model, mesh=self.mesh, mp_policy=self.policy)
        return model

    @contextmanager
    def synchronize(self, model: nn.Module, last: bool) -> Iterator[None]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        yield

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()  # the mixed-precision policy casts
