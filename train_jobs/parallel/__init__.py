"""How one model is spread over the ranks: one file a strategy, one table from name to strategy."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from cluster.config.parallel_section import Strategy
from cluster.config.train_section import TrainJobConfig
from cluster.errors import RequestError
from train_jobs.parallel import data_parallel, ddp, fsdp, hsdp, zero1, zero2, zero3
from train_jobs.parallel.activations import checkpoint_activations, compile_blocks
from train_jobs.parallel.mesh import Mesh
from train_jobs.parallel.model import Parallelize, ParallelModel
from train_jobs.parallel.tensor import apply_tensor_parallelism

STRATEGIES: dict[Strategy, Parallelize] = {
    "data_parallel": data_parallel.parallelize,
    "ddp": ddp.parallelize,
    "fsdp": fsdp.parallelize,
    "hsdp": hsdp.parallelize,
    "zero1": zero1.parallelize,
    "zero2": zero2.parallelize,
    "zero3": zero3.parallelize,
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
