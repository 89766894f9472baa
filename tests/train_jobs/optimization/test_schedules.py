"""Learning-rate schedules against those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from cluster.config.sections.train import OptimizerConfig
from train_jobs.optimization.schedules import learning_rate

STEPS, WARMUP, DECAY = 100, 10, 20
ORACLES: dict[str, Callable[[Any], Any]] = {
    "constant": lambda optimizer: get_constant_schedule_with_warmup(optimizer, WARMUP),
    "linear": lambda optimizer: get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS),
    "cosine": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS),
    "warmup_stable_decay": lambda optimizer: get_wsd_schedule(
        optimizer, WARMUP, DECAY, num_training_steps=STEPS, decay_type="linear"
    ),
}


@pytest.mark.parametrize("name", ORACLES)
def test_after_the_warm_up_it_is_transformers_own(name: str) -> None:
    config = OptimizerConfig(
        learning_rate=0.5,
        schedule=name,  # type: ignore[arg-type]
        warmup_steps=WARMUP,
        decay_steps=DECAY,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    oracle = ORACLES[name](optimizer)
    for step in range(STEPS):
        if step >= WARMUP:
            assert learning_rate(config, step, STEPS) == pytest.approx(oracle.get_last_lr()[0])
        else:  # transformers begins with a step at 0, which would be lost
            assert learning_rate(config, step, STEPS) == pytest.approx(0.5 * (step + 1) / WARMUP)
        optimizer.step()
        oracle.step()


def test_what_is_left_at_the_end() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", final_fraction=0.1)
    rates = [learning_rate(config, step, 1000) for step in range(1001)]
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates == sorted(rates, reverse=True)
    assert rates[500] == pytest.approx(0.55)


def test_the_decay_is_a_tenth_of_the_steps_unless_said() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="warmup_stable_decay")
    rates = [learning_rate(config, step, 50) for step in range(50)]
    assert [rate < 1.0 for rate in rates] == [False] * 46 + [True] * 4


@pytest.mark.parametrize("name", ORACLES)
def test_a_warm_up_that_is_longer_than_the_job_ends_with_it_at_the_full_rate(name: str) -> None:
    config = OptimizerConfig(
        learning_rate=0.5,
        schedule=name,  # type: ignore[arg-type]
        warmup_steps=20,
    )
    assert [learning_rate(config, step, 4) for step in range(4)] == [0.125, 0.25, 0.375, 0.5]
