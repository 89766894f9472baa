"""The learning rate as a function of the step: linear warm-up, then one of several shapes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from cluster.config.sections.train import OptimizerConfig

Shape = Callable[[OptimizerConfig, int, int], float]
"""What is left (1 to 0) at a step after the warm-up; arguments: settings, step, the job's steps."""


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of a step (from 0) of a job of `steps` steps; it warms up for as many at most."""
    warmup_steps = min(config.warmup_steps, steps)
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / warmup_steps
    left = SHAPES[config.schedule](config, step, steps)
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * left)


def _progress(first: int, step: int, last: int) -> float:
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))


def _constant(config: OptimizerConfig, step: int, steps: int) -> float:
    return 1.0


def _linear(config: OptimizerConfig, step: int, steps: int) -> float:
    return 1.0 - _progress(config.warmup_steps, step, steps)


def _cosine(config: OptimizerConfig, step: int, steps: int) -> float:
    """Loshchilov and Hutter, SGDR, ICLR 2017, without restarts."""
    return 0.5 * (1.0 + math.cos(math.pi * _progress(config.warmup_steps, step, steps)))


def _warmup_stable_decay(config: OptimizerConfig, step: int, steps: int) -> float:
    """Hu et al., MiniCPM, 2024; the fall is linear."""
    decay = config.decay_steps if config.decay_steps is not None else math.ceil(steps / 10)
    return 1.0 - _progress(steps - decay, step, steps)


SHAPES: dict[str, Shape] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "warmup_stable_decay": _warmup_stable_decay,
}
"""From the config's `optimizer.schedule` to the shape."""
