"""Every strategy on real processes against a single-process run, and going on from checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.combinations import COMBINATIONS, QUICK
from tests.train_jobs.ranks import loss_of_export, reports, run_ranks, start_ranks, tiny_job, write_corpus

# The ranks sum the same fp32 numbers in another order: a loss near 6 may differ by a few units in the last
# place (4.8e-7 each) in each step, and the differences feed back through the weights.
TOLERANCE = 3e-6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    run = tmp_path_factory.mktemp("alone")
    return run_ranks(tiny_job(corpus), run, world_size=1), run


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [line for line in reports(run) if line.get("kind") == "evaluated"]


@dataclass(frozen=True)
class Differences:
    """The largest differences of a run to another one."""

    loss: float
    grad_norm: float
    evaluation: float


def compare(run: Path, reference: Path) -> Differences:
    """Compare two runs, step by step; what is counted has to be the same."""
    ours, theirs = ([line for line in reports(each) if "kind" not in line] for each in (run, reference))
    for line, other in zip(ours, theirs, strict=True):
        for key in ("step", "samples", "tokens", "learning_rate"):
            assert line[key] == other[key]
    evaluated = list(zip(evaluations(run), evaluations(reference), strict=True))
    for line, other in evaluated:
        assert (line["step"], line["tokens"]) == (other["step"], other["tokens"])
    steps = list(zip(ours, theirs, strict=True))
    return Differences(
        *(max(abs(line[key] - other[key]) for line, other in steps) for key in ("loss", "grad_norm")),
        max(abs(line["loss"] - other["loss"]) for line, other in evaluated),
    )


SHORT = {
    "steps": 10,
    "evaluate": {"every_steps": 5},
    "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5},
}
LONG = {**SHORT, "steps": 50, "evaluate": {"every_steps": 25}, "batch": {"global": 16, "micro": 2}}


@pytest.fixture(scope="module")
def references(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The single-process run of a config, made once."""

    @cache
    def reference(length: str) -> Path:
        run = tmp_path_factory.mktemp(f"reference-{length}")
        metrics = run_ranks(tiny_job(corpus, **{"short": SHORT, "long": LONG}[length]), run, world_size=1)
        assert all(line["grad_norm"] > 0.5 for line in metrics), "the gradients are not clipped"
        return run

    return reference


@pytest.mark.parametrize("name", QUICK)
def test_many_ranks_step_like_one(
    name: str, corpus: Path, references: Callable[..., Path], tmp_path: Path
) -> None:
    parallel, world_size = COMBINATIONS[name]
    run_ranks(tiny_job(corpus, parallel=parallel, **SHORT), tmp_path, world_size)
    differences = compare(tmp_path, references("short"))
    assert max(astuple(differences)) < TOLERANCE, differences


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp ×2", "fsdp ×2", "zero1 ×2", "ddp ×2 × cp 2"])
def test_compiled_blocks_step_like_one_process(
    name: str, corpus: Path, references: Callable[..., Path], tmp_path: Path
) -> None:
    parallel, world_size = COMBINATIONS[name]
    compiled = {**parallel, "compile": True, "activation_checkpointing": "full"}
    run_ranks(tiny_job(corpus, parallel=compiled, **SHORT), tmp_path, world_size)
    assert max(astuple(compare(tmp_path, references("short")))) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_many_ranks_step_like_one_for_fifty_steps(
    name: str, corpus: Path, references: Callable[..., Path], tmp_path: Path
) -> None:
    parallel, world_size = COMBINATIONS[name]
    run_ranks(tiny_job(corpus, parallel=parallel, **LONG), tmp_path, world_size)
    differences = compare(tmp_path, references("long"))
    print(f"\n| {name} | {world_size} | " + " | ".join(f"{each:.1e}" for each in astuple(differences)) + " |")
    assert max(astuple(differences)) < TOLERANCE, differences


def test_one_process_steps_like_plain_torch(corpus: Path, alone: tuple[list[dict[str, Any]], Path]) -> None:
    """The oracle: transformers' own loss, torch's own AdamW and clipping, a whole global batch at once."""
    import numpy as np
    import torch

    from train_jobs.tasks.causal_lm import CausalLM

    metrics, run = alone
    config = tiny_job(corpus)

    tokens = torch.from_numpy(np.load(run / "data" / "train.npy").astype("int64"))
    num_samples = (len(tokens) - 1) // 16
    order = np.random.default_rng([1, 0]).permutation(num_samples)
    model = CausalLM(config, run / "data").build()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step, line in enumerate(metrics):
        windows = torch.stack([tokens[i * 16 : i * 16 + 17] for i in order[step * 8 : step * 8 + 8]])
        logits = model(input_ids=windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = 1e-2 * ((step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 6)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        # Ten times the learning rate of the other tests, in which such differences grow.
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert line["learning_rate"] == pytest.approx(rate)


def test_the_exported_model_has_the_loss_that_the_evaluation_said(
    corpus: Path, alone: tuple[list[dict[str, Any]], Path]
) -> None:
    _, run = alone
    loss, tokens = loss_of_export(tiny_job(corpus), run)
    last = evaluations(run)[-1]
    assert (last["step"], last["tokens"]) == (8, tokens)
    assert last["loss"] == pytest.approx(loss, abs=TOLERANCE)
    assert last["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.slow  # the quickstart, which is run with every change, kills a rank under FSDP
@pytest.mark.parametrize(("strategy", "asynchronous"), [("ddp", False), ("fsdp", False), ("fsdp", True)])
def test_a_killed_run_goes_on_from_its_checkpoint_bit_for_bit(
    strategy: str, asynchronous: bool, corpus: Path, tmp_path: Path
) -> None:
    config = tiny_job(
        corpus,
        steps=60,
        parallel={"strategy": strategy},
        checkpoint={"every_steps": 3, "asynchronous": asynchronous},
        evaluate={"every_steps": None},
    )
    goes_on_bit_for_bit(config, tmp_path)


def goes_on_bit_for_bit(config: TrainJobConfig, directory: Path) -> Path:
    """Kill one of two ranks, start again, compare with an undisturbed run; returns the killed run."""
    undisturbed = run_ranks(config, directory / "undisturbed", 2)
    run = directory / "killed"
    processes = start_ranks(config, run, 2)
    wait_for(lambda: (run / "checkpoints" / "step-00000003" / "committed.json").exists(), processes)
    processes[1].kill()
    for process in processes:
        process.wait(60)
    assert not (run / "export").exists(), "the run ended before it was killed"
    again = run_ranks(config, run, 2, attempt=2)
    assert again[0]["step"] > 3
    losses = {line["step"]: line["loss"] for line in reports(run) if "kind" not in line}
    assert losses == {line["step"]: line["loss"] for line in undisturbed}
    return run


def wait_for(condition: Callable[[], bool], processes: list[Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        assert all(process.exit_code in (None, 0) for process in processes)
        time.sleep(0.002)
