"""The optimizers by name: torch's own, fused where the device allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cluster.config.sections.train import OptimizerConfig
from train_jobs.optimization.adafactor import ShardedAdafactor

Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of a model's parameters."""
    return OPTIMIZERS[config.name](parameter_groups(model, config), config)


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> Groups:
    """What an optimizer steps; weight decay leaves norms and biases (one dimension) out."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019."""
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)


def _sgd(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        groups,
        lr=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.nesterov,
        fused=not _is_sharded(groups),  # torch has no fused SGD of DTensors
    )


def _adafactor(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Shazeer and Stern, Adafactor, ICML 2018."""
    kind = ShardedAdafactor if _is_sharded(groups) else torch.optim.Adafactor
    return kind(groups, lr=config.learning_rate)


def _is_sharded(groups: Groups) -> bool:
    return any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])


OPTIMIZERS: dict[str, Callable[[Groups, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "adafactor": _adafactor,
}
"""From the config's `optimizer.name` to what builds it."""
