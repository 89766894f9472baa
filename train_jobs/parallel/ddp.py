"""DistributedDataParallel: every rank holds the whole model; gradient buckets are all-reduced in backward.

Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.

Beside tensor parallelism the parameters are DTensors, which DistributedDataParallel does not know: there
FSDP2 does the same with shard groups of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from cluster.config.sections.train import TrainJobConfig
from train_jobs.parallel.compression import Compression
from train_jobs.parallel.mesh import Mesh
from train_jobs.parallel.model import ParallelModel, autocast_dtype
from train_jobs.parallel.sharding import shard


class ReplicatedModel(ParallelModel):
    """Under DistributedDataParallel; parameters, gradients and optimizer state are whole on every rank."""

    def __init__(self, model: nn.Module, mesh: Mesh, config: TrainJobConfig) -> None:
        settings = config.parallel.ddp
        if settings.sync_batch_norm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        has_statistics = any(isinstance(module, _BatchNorm) for module in model.modules())
        model.to(mesh.device)
        self.ddp = DistributedDataParallel(
            model,
            device_ids=[mesh.device.index] if mesh.device.type == "cuda" else None,
            bucket_cap_mb=settings.bucket_cap_mb,
            static_graph=settings.static_graph,
            find_unused_parameters=settings.find_unused_parameters,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            # Batch statistics are rank 0's everywhere; a transformer's buffers are constants.
            forward_sync_buffers=has_statistics and not settings.sync_batch_norm,
        )
        super().__init__(self.ddp, mesh, autocast_dtype(config))
        self.stepped = model
        self.compression = Compression(self.ddp, settings)
        # A static graph is recorded in the first backward, which has to synchronise for that.
        self._recorded = not settings.static_graph

    @contextmanager
    def synchronize(self, last: bool) -> Iterator[None]:
        if last or not self._recorded:
            yield
            self._recorded = True
        else:
            with self.ddp.no_sync():
                yield

    def own_state(self) -> dict[str, Any]:
        return self.compression.state()

    def load_own_state(self, state: dict[str, Any]) -> None:
        self.compression.load(state)


def parallelize(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, config: TrainJobConfig
) -> ParallelModel:
    if mesh.shape.tp > 1:
        return shard(model, blocks, mesh, config)
    if config.group_size is not None:
        model.to(mesh.device)
        parallel = ParallelModel(model, mesh, autocast_dtype(config))
        parallel.reduces = False  # gradients are summed over all ranks of all groups at once
        return parallel
    return ReplicatedModel(model, mesh, config)
