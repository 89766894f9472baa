"""Adafactor for parameters that are DTensors, which torch's own does not step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate


class ShardedAdafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor's arithmetic and state on sharded parameters (Shazeer and Stern, ICML 2018).

    Row and column statistics of a matrix go over dims that are cut over ranks: each is summed locally and
    reduced over the axes that cut it. Plain parameters are taken as well.
    """

    def __init__(
        self, params: Any, lr: float, beta2_decay: float = -0.8, eps2: float = 1e-3, d: float = 1.0
    ) -> None:
        super().__init__(
            params, {"lr": lr, "beta2_decay": beta2_decay, "eps2": eps2, "d": d, "weight_decay": 0.0}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            self._start(state, gradient)
        state["step"] += 1
        step, lr = state["step"].item(), group["lr"]
        whole, own, own_gradient = parameter.numel(), _local(parameter), _local(gradient)
        keep = step ** group["beta2_decay"]
        eps1 = torch.finfo(own.dtype).eps
        alpha = max(group["eps2"], _norm(parameter, own) / whole**0.5) * min(lr, step**-0.5)
        own.mul_(1 - lr * group["weight_decay"])
        squared = own_gradient * own_gradient
        if gradient.ndim > 1:
            row, column = _local(state["row_var"]), _local(state["col_var"])
            row.lerp_(_reduced(gradient, squared, -1) / gradient.shape[-1], keep)
            column.lerp_(_reduced(gradient, squared, -2) / gradient.shape[-2], keep)
            mean = _reduced(state["row_var"], row, -2) / gradient.shape[-2]
            estimate = row * column / mean.clamp_(min=eps1)
        else:
            variance = _local(state["variance"])
            variance.lerp_(squared, keep)
            estimate = variance.clone()
        update = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(own_gradient)
        denominator = max(1.0, _norm(parameter, update) / (whole**0.5 * group["d"]))
        own.add_(update, alpha=-alpha / denominator)

    @staticmethod
    def _start(state: dict[str, Any], gradient: Tensor) -> None:
        state["step"] = torch.tensor(0.0)
        if gradient.ndim > 1:
            zeros = torch.zeros_like(_local(gradient))
            state["row_var"] = _sum(gradient, zeros, -1)
            state["col_var"] = _sum(gradient, zeros, -2)
        else:
            state["variance"] = torch.zeros_like(gradient)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _norm(like: Tensor, own: Tensor) -> float:
    """The 2-norm of a tensor that lies as `like` does, of which this rank holds `own`."""
    summed = (own * own).sum()
    if isinstance(like, DTensor):
        placements = [_placement(p, range(like.ndim), like.ndim) for p in like.placements]
        summed = DTensor.from_local(summed, like.device_mesh, placements, run_check=False).full_tensor()
    return summed.item() ** 0.5


def _reduced(like: Tensor, own: Tensor, dim: int) -> Tensor:
    """This rank's part of the sum over one dim."""
    return _local(_sum(like, own, dim))


def _sum(like: Tensor, own: Tensor, dim: int) -> Tensor:
    """The sum over one dim, which stays as a dim of 1, placed as `like` is in the other dims."""
    summed = own.sum(dim, keepdim=True)
    if not isinstance(like, DTensor):
        return summed
    shape = list(like.shape)
    shape[dim] = 1
    partial = DTensor.from_local(
        summed,
        like.device_mesh,
        [_placement(p, (dim % like.ndim,), like.ndim) for p in like.placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    return partial.redistribute(placements=[Replicate() if p.is_partial() else p for p in partial.placements])


def _placement(placement: Placement, summed_dims: Collection[int], ndim: int) -> Placement:
    """How a sum over dims lies where the summands lie so: partial on the axes that cut a summed dim."""
    dim = getattr(placement, "dim", None)
    return Partial() if dim is not None and dim % ndim in summed_dims else placement
