"""ZeRO stage 2: gradients and optimizer state sharded, parameters whole during a step.

FSDP2 without resharding: parameters are all-gathered once in a step, in its first forward, and stay whole
until the backward of its last micro-batch; between steps only shards are kept (Rajbhandari et al., SC 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from cluster.config.train_section import TrainJobConfig
from train_jobs.parallel.mesh import Mesh
from train_jobs.parallel.model import ParallelModel
from train_jobs.parallel.sharding import shard


def parallelize(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, config: TrainJobConfig
) -> ParallelModel:
    return shard(model, blocks, mesh, config, keep_gathered=True)
