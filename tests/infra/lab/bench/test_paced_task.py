"""A training task that lasts as long as it is told, and learns all the same."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infra.lab.bench.paced_task import PacedTask


def task(sample_s: float) -> PacedTask:
    settings: Any = SimpleNamespace(seed=3, settings={"sample_s": sample_s})
    return PacedTask(settings)


def batch_of(paced: PacedTask, size: int) -> dict[str, torch.Tensor]:
    data = paced.samples(held_out=False)
    return {name: torch.stack([data[each][name] for each in range(size)]) for name in data[0]}


def test_a_micro_batch_lasts_so_long_a_sample_and_many_do_at_once() -> None:
    paced = task(0.05)
    model, batch = paced.build(), batch_of(paced, 4)
    began = time.perf_counter()
    with ThreadPoolExecutor(8) as ranks:
        sums = list(ranks.map(lambda _: paced.loss(model, batch), range(8)))
    assert time.perf_counter() - began == pytest.approx(0.2, abs=0.15)
    assert [each.count for each in sums] == [4] * 8


def test_it_learns() -> None:
    paced = task(0.0)
    torch.manual_seed(0)
    model, batch = paced.build(), batch_of(paced, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = paced.loss(model, batch).loss.item()
    for _ in range(100):
        optimizer.zero_grad()
        paced.loss(model, batch).loss.backward()
        optimizer.step()
    assert paced.loss(model, batch).loss.item() < 0.2 * first


def test_all_ranks_have_the_same_data_and_what_is_held_out_is_other() -> None:
    one, other = task(0.0).samples(held_out=False)[7], task(0.0).samples(held_out=False)[7]
    assert torch.equal(one["inputs"], other["inputs"])
    assert not torch.equal(one["inputs"], task(0.0).samples(held_out=True)[7]["inputs"])
