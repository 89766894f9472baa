"""How one model is spread over the ranks: one table from a strategy's name to what carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from cluster.config.sections.parallel import Strategy
from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from train_jobs.parallel import data_parallel, ddp, zero1
from train_jobs.parallel.activations import checkpoint_activations, compile_blocks
from train_jobs.parallel.mesh import Mesh
from train_jobs.parallel.model import Parallelize, ParallelModel
from train_jobs.parallel.sharding import shard
from train_jobs.parallel.tensor import apply_tensor_parallelism

STRATEGIES: dict[Strategy, Parallelize] = {
    "data_parallel": data_parallel.parallelize,
    "ddp": ddp.parallelize,
    # Parameters, gradients and optimizer state over all data-parallel ranks: a block's parameters are whole
    # only while it computes (ZeRO stage 3; Rajbhandari et al., SC 2020).
    "fsdp": shard,
    # The same inside a node, as ddp across nodes: parameters are gathered over the node's own links, and only
    # shards of gradients are all-reduced. The mesh makes the difference: `fully_shard` gets both data axes.
    "hsdp": shard,
    "zero1": zero1.parallelize,
    # Gradients and optimizer state sharded, parameters whole during a step: gathered once, in its first
    # forward, they stay until the backward of its last micro-batch (the same paper).
    "zero2": partial(shard, keep_gathered=True),
    # As fsdp, and the shards lie in CPU memory between their uses: parameters travel to the GPU as they are
    # gathered, gradients back as they are reduced, and the optimizer steps on the CPU (Ren et al.,
    # ZeRO-Offload, USENIX ATC 2021). `parallel.offload: false` keeps them on the GPU.
    "zero3": shard,
}
"""From the config's `parallel.strategy` to what carries it out."""


def parallelize(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, config: TrainJobConfig
) -> ParallelModel:
    """Spread a model over all axes of the mesh.

    Args:
        model: on the CPU; or on device `meta`, for strategies that shard.

    Raises:
        RequestError: the model cannot be spread as the config asks.
    """
    if config.parallel.engine == "deepspeed":
        from train_jobs.parallel import deepspeed_engine  # an extra

        return deepspeed_engine.parallelize(model, blocks, mesh, config)
    if mesh.shape.tp > 1:
        apply_tensor_parallelism(model, mesh)
    checkpoint_activations(blocks, config.parallel.activation_checkpointing)
    if config.parallel.compile:
        compile_blocks(blocks)
    parallel = STRATEGIES[config.parallel.strategy](model, blocks, mesh, config)
    if mesh.shape.cp > 1:
        from transformers import PreTrainedModel

        from train_jobs.parallel.context import ContextParallelism

        if not isinstance(model, PreTrainedModel):
            raise RequestError(f"parallel.context: {type(model).__name__} is no model of transformers")
        parallel.context = ContextParallelism(model, mesh, config.parallel.context_method)
    return parallel
