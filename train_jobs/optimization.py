"""Optimizer, learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from cluster.config.train_section import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: norms and biases (one dimension) are left out."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def learning_rate_factor(config: OptimizerConfig, step: int, steps: int) -> float:
    """Factor on the learning rate at a step (from 0): linear warm-up, then the schedule's shape."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    if config.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: learning_rate_factor(config, step, steps))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before.

    The norm is that of the whole model, over all shards: DTensor reduces it over the mesh.
    """
    gradients = [parameter for parameter in parameters if parameter.grad is not None]
    norm: Tensor = torch.nn.utils.clip_grad_norm_(gradients, math.inf if max_norm is None else max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return float(norm)
