"""The loss scale moves as torch's GradScaler does."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train_jobs.optimization import loss_scale
from train_jobs.optimization.loss_scale import LossScale


def torch_scales(finite: list[bool], start: float) -> list[float]:
    """What torch.amp.GradScaler makes of gradients that are finite or not."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=3)
    scales = []
    for each in finite:
        scaler.scale(parameter.sum()).backward()
        if not each:
            assert parameter.grad is not None
            parameter.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@settings(deadline=None)  # torch imports a part of itself in the first call
@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_it_moves_as_torchs_own(finite: list[bool]) -> None:
    scale, ours = LossScale(enabled=True), []
    interval, loss_scale.GROWTH_INTERVAL = loss_scale.GROWTH_INTERVAL, 3
    try:
        for each in finite:
            scale.update(each)
            ours.append(scale.value)
    finally:
        loss_scale.GROWTH_INTERVAL = interval
    assert ours == torch_scales(finite, loss_scale.START)


def test_a_scale_that_no_gradient_survives_is_exhausted() -> None:
    scale = LossScale(enabled=True)
    for _ in range(30):
        assert not scale.exhausted
        scale.update(finite=False)
    scale.update(finite=False)
    assert scale.exhausted


def test_it_is_found_again() -> None:
    scale, again = LossScale(enabled=True), LossScale(enabled=True)
    for finite in (True, False, True, True):
        scale.update(finite)
    again.load(scale.state())
    assert (again.value, again.good_steps) == (scale.value, scale.good_steps) == (2.0**15, 2)


def test_without_fp16_nothing_is_scaled() -> None:
    scale = LossScale(enabled=False)
    scale.update(finite=False)
    scale.load({"value": 8.0, "good_steps": 1})
    assert scale.value == 1.0
