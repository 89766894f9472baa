"""What tells a wrong gradient from one that was summed in another order, on the laboratory's own task."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from infra.lab.faults.fault_course import wrong_losses
from infra.lab.faults.laboratory import OPTIMIZER, OTHER_ORDER
from infra.lab.faults.task import SAMPLES, Model, Points

STEPS = 240
BATCH = 12
WRONG_STEP = 120


def batches() -> Iterator[list[int]]:
    """Samples of each step, an epoch after the other."""
    draw = torch.Generator().manual_seed(1)
    while True:
        epoch = torch.randperm(SAMPLES, generator=draw).tolist()
        yield from (epoch[first : first + BATCH] for first in range(0, SAMPLES - BATCH + 1, BATCH))


def losses(shares: Callable[[int], int], twice: int | None = None) -> dict[int, float]:
    """Loss by step of one process that sums the gradients of so many shares of each batch.

    Args:
        twice: in this step the first share's gradient counts twice.
    """
    torch.manual_seed(2)
    points = [Points()[index] for index in range(SAMPLES)]
    inputs, targets = (torch.stack([point[key] for point in points]) for key in ("x", "y"))
    model = Model(pause_s=0.0)
    settings = {"lr": OPTIMIZER["learning_rate"], "momentum": OPTIMIZER["momentum"]}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    found = {}
    for step, batch in zip(range(1, STEPS + 1), batches(), strict=False):
        sums = [torch.zeros_like(each) for each in model.parameters()]
        total = 0.0
        for place, share in enumerate(torch.tensor(batch).chunk(shares(step))):
            optimizer.zero_grad()
            loss = (model(inputs[share]) - targets[share]).square().sum()
            loss.backward()
            total += loss.item()
            weight = 2.0 if step == twice and place == 0 else 1.0
            for summed, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                summed += weight * parameter.grad
        for summed, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = summed / BATCH
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found[step] = total / BATCH
    return found


def lines(of: dict[int, float]) -> list[dict[str, float]]:
    return [{"step": step, "loss": loss} for step, loss in of.items()]


def test_another_order_is_within_the_tolerance_and_one_wrong_share_far_beyond() -> None:
    undisturbed = losses(lambda step: 2)
    groups_come_and_go = losses(lambda step: 3 if step % 80 < 50 else 2)
    assert groups_come_and_go != undisturbed
    assert wrong_losses(lines(groups_come_and_go), undisturbed, OTHER_ORDER) == []
    wrong = losses(lambda step: 3, twice=WRONG_STEP)
    (sentence,) = wrong_losses(lines(wrong), undisturbed, 10 * OTHER_ORDER)
    count, first = int(sentence.split()[0]), sentence.partition("first of step ")[2]
    assert int(first.partition(":")[0]) == WRONG_STEP + 1
    assert count > 0.5 * (STEPS - WRONG_STEP), "of the steps after it"
