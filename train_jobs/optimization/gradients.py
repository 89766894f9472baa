"""The norm of all gradients over every axis of the mesh, and scaling them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def global_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The 2-norm of the gradients of the whole model, the same on every rank.

    Under tensor parallelism a model's parameters lie on different meshes (norms are whole on each `tp` rank,
    projections are cut), and one collective knows one mesh: each kind is summed over its own.
    """
    norms = []
    for gradients in by_placement(parameters).values():
        norm = torch.nn.utils.get_total_norm(gradients)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return 0.0
    device = norms[0].device
    return float(torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms])))


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients, in place; a factor of 1 costs nothing."""
    if factor == 1.0:
        return
    local = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(local, factor)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What brings a gradient of this norm down to `max_norm`; 1 where it is small enough, as torch has it."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def by_placement(parameters: Iterable[nn.Parameter]) -> dict[object, list[Tensor]]:
    """The gradients that lie on the same mesh in the same way."""
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
            groups.setdefault(key, []).append(gradient)
    return groups


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, which may be spread over a mesh."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
