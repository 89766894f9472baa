"""Optimizers by name: groups, and sharded parameters stepped as whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config.sections.train import OptimizerConfig
from tests.train_jobs.ranks import run_ranks, tiny_job, write_corpus
from train_jobs.optimization.adafactor import ShardedAdafactor
from train_jobs.optimization.optimizers import OPTIMIZERS, build_optimizer
from train_jobs.parallel.model import ParallelModel

# The same fp32 sums in another order; Adafactor divides by roots of small numbers.
TOLERANCE = 2e-5


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 5),
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_leaves_norms_and_biases_out(name: str) -> None:
    built = build_optimizer(model(), OptimizerConfig(name=name, weight_decay=0.3))  # type: ignore[arg-type]
    decays = {
        tuple(parameter.shape): group["weight_decay"]
        for group in built.param_groups
        for parameter in group["params"]
    }
    assert decays == {(4, 3, 3, 3): 0.3, (4,): 0.0, (5, 16): 0.3, (5,): 0.0}


def test_our_adafactor_steps_as_torchs_own() -> None:
    ours, theirs = model(), model()
    settings = [
        [
            {"params": [p for p in each.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in each.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        for each in (ours, theirs)
    ]
    optimizers = [ShardedAdafactor(settings[0], lr=0.05), torch.optim.Adafactor(settings[1], lr=0.05)]
    inputs = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        for each, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            each(inputs).square().sum().backward()
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    for mine, other in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
        assert mine.keys() == other.keys()
        assert all(mine[key].shape == other[key].shape for key in mine)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


SPREAD: dict[str, tuple[dict[str, Any], int]] = {
    "ddp": ({"strategy": "ddp"}, 2),
    "zero1": ({"strategy": "zero1"}, 2),
    "fsdp": ({"strategy": "fsdp"}, 4),
    "fsdp-tp": ({"strategy": "fsdp", "tensor": 2}, 4),
}
QUICK = {("sgd", "zero1")}


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        pytest.param(name, spread, marks=[] if (name, spread) in QUICK else pytest.mark.slow)
        for name in ("adafactor", "sgd")
        for spread in SPREAD
    ],
)
def test_sharded_parameters_are_stepped_as_whole_ones(
    name: str, spread: str, corpus: Path, tmp_path: Path
) -> None:
    parallel, world_size = SPREAD[spread]
    settings = {"name": name, "learning_rate": 0.1 if name == "sgd" else 0.01}
    alone = run_ranks(tiny_job(corpus, optimizer=settings), tmp_path / "alone", 1)
    metrics = run_ranks(
        tiny_job(corpus, optimizer=settings, parallel=parallel), tmp_path / "many", world_size
    )
    assert [line["loss"] for line in metrics] == pytest.approx(
        [line["loss"] for line in alone], abs=TOLERANCE
    )
    assert alone[-1]["loss"] < alone[0]["loss"] - 0.05, "nothing was learned"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_whose_state_was_saved_before_its_first_step_steps_as_any_other(name: str) -> None:
    stepped = []
    for looks in (False, True):
        module = model()
        optimizer = build_optimizer(module, OptimizerConfig(name=name))  # type: ignore[arg-type]
        if looks:
            ParallelModel(module, mesh=None).state(optimizer)  # type: ignore[arg-type]
        for factor in (1.0, 0.5):
            module(torch.ones(2, 3, 4, 4) * factor).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        stepped.append(module.state_dict())
    assert all(torch.equal(stepped[0][key], stepped[1][key]) for key in stepped[0])
