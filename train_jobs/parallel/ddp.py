"""DistributedDataParallel: every rank holds the whole model; gradient buckets are all-reduced in backward.

Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from train_jobs.parallel.strategy import Precision


class DDP:
    """Replicates parameters, gradients and optimizer state on every rank."""

    def __init__(self, mesh: DeviceMesh, precision: Precision) -> None:
        self.mesh = mesh
        self.precision = precision

    def parallelize(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        devices = [torch.cuda.current_device()] if self.mesh.device_type == "cuda" else None
        return DistributedDataParallel(
            model,
            device_ids=devices,
            process_group=self.mesh.get_group(),
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # a transformer's buffers are constants
        )

    def synchronize(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if last else model.no_sync()

    def autocast(self) -> AbstractContextManager[None]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.mesh.device_type, dtype=torch.bfloat16)
