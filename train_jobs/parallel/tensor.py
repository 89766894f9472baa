"""Tensor parallelism: every matrix product of a block is shared by the ranks of the `tp` axis.

Shoeybi et al., Megatron-LM, 2019: projections into a block are cut by columns, those out of it by rows, so
that a block needs one all-reduce after attention and one after its MLP. Which is which is the model's own
plan in transformers; torch's `parallelize_module` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from cluster.errors import RequestError
from train_jobs.parallel.mesh import Mesh

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""From the words of transformers' plans to torch's styles."""


def apply_tensor_parallelism(model: nn.Module, mesh: Mesh) -> None:
    """Cut the parameters that the model's plan names over the `tp` axis; the others stay whole.

    Raises:
        RequestError: the model has no plan, or one with words that are not in STYLES.
    """
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    name = type(model).__name__
    if not plan:
        raise RequestError(f"parallel.tensor: transformers has no tensor-parallel plan for {name}")
    unknown = sorted(set(plan.values()) - STYLES.keys())
    if unknown:
        raise RequestError(
            f"parallel.tensor: the plan of {name} asks for {', '.join(unknown)}; training knows "
            f"{', '.join(STYLES)}"
        )
    tied = _tied(model)
    parallelize_module(model, mesh.tp, {path: STYLES[style]() for path, style in plan.items()})
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for other in others:
            module, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(module), leaf, parameter)


def _tied(model: nn.Module) -> list[list[str]]:
    """Names of the same parameter, where it has several: cutting would make several parameters of it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]
