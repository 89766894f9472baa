"""DeepSpeed as the engine: the same steps as torch's, and checkpoints that it goes on from."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from tests.train_jobs.parallel.test_strategies import goes_on_bit_for_bit
from tests.train_jobs.ranks import (
    assemble,
    loss_of_export,
    reports,
    run_program,
    run_ranks,
    start_ranks,
    tiny_job,
    write_corpus,
)
from train_jobs.checkpoint.export import export_checkpoint
from train_jobs.data.preparation import prepare_data
from train_jobs.spec import DATA

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="DeepSpeed is an extra: pip install 'shoal[deepspeed]'"
    ),
]

TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4
BF16_TOLERANCE = 0.03
"""Eight bits of mantissa, and what DeepSpeed rounds is not quite what autocast rounds."""


ZERO_2 = {"zero_optimization": {"stage": 2}}
SMALL_STEPS = {"learning_rate": 1e-3}


def job(corpus: Path, settings: dict[str, Any], **changes: Any) -> TrainJobConfig:
    parallel = {"engine": "deepspeed", "deepspeed": settings}
    return tiny_job(corpus, **{"steps": 12, "parallel": parallel, "optimizer": SMALL_STEPS, **changes})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


@pytest.fixture(scope="module")
def with_torch(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(tiny_job(corpus, steps=12, optimizer=SMALL_STEPS), tmp_path_factory.mktemp("torch"), 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_steps_as_torch_does(
    stage: int, corpus: Path, with_torch: list[dict[str, Any]], tmp_path: Path
) -> None:
    lines = run_ranks(job(corpus, {"zero_optimization": {"stage": stage}}), tmp_path / "run", 2)
    assert len(lines) == len(with_torch) == 12
    for line, same in zip(lines, with_torch, strict=True):
        assert line["loss"] == pytest.approx(same["loss"], abs=TOLERANCE)
        assert line["grad_norm"] == pytest.approx(same["grad_norm"], rel=NORM_TOLERANCE)
        assert line["learning_rate"] == same["learning_rate"]


def test_it_casts_to_bf16_and_shows_the_norm(
    corpus: Path, with_torch: list[dict[str, Any]], tmp_path: Path
) -> None:
    config = job(corpus, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}, precision="bf16")
    lines = run_ranks(config, tmp_path / "run", 2)
    for line, same in zip(lines, with_torch, strict=True):
        assert line["loss"] != same["loss"]
        assert line["loss"] == pytest.approx(same["loss"], abs=BF16_TOLERANCE)
        assert line["grad_norm"] == pytest.approx(same["grad_norm"], rel=0.1)


def test_an_optimizer_of_its_own_takes_the_jobs_parameters(
    corpus: Path, with_torch: list[dict[str, Any]], tmp_path: Path
) -> None:
    of_the_job = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    optimizer = {"type": "AdamW", "params": {**of_the_job, "torch_adam": True}}
    lines = run_ranks(job(corpus, {"optimizer": optimizer}), tmp_path / "run", 2)
    for line, same in zip(lines, with_torch, strict=True):
        assert line["loss"] == pytest.approx(same["loss"], abs=TOLERANCE)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_killed_run_goes_on_bit_for_bit_and_its_model_is_exported(
    stage: int, corpus: Path, tmp_path: Path
) -> None:
    config = job(
        corpus,
        {"zero_optimization": {"stage": stage}},
        steps=40,
        checkpoint={"every_steps": 3},
        evaluate={"every_steps": 40},
    )
    run = goes_on_bit_for_bit(config, tmp_path)
    evaluation = [line for line in reports(run) if line.get("kind") == "evaluated"][-1]
    loss, tokens = loss_of_export(config, run)
    assert evaluation["tokens"] == tokens
    assert evaluation["loss"] == pytest.approx(loss, abs=TOLERANCE)
    export_checkpoint(Storage(run), config, 40, tmp_path / "again")
    weights = [load_file(path / "model.safetensors") for path in (run / "export", tmp_path / "again")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def failure(config: TrainJobConfig, run: Path, world_size: int) -> str:
    """What rank 0 said before it failed."""
    processes = start_ranks(config, run, world_size, attempt=2)
    for process in processes:
        process.wait()
        assert process.exit_code == 1
    return processes[0].log.read_text().strip().splitlines()[-1]


def test_its_state_is_loaded_by_the_engine_and_the_ranks_that_saved_it(corpus: Path, tmp_path: Path) -> None:
    engine, of_torch = job(corpus, ZERO_2, steps=4), tiny_job(corpus, steps=4)
    run_ranks(engine, tmp_path / "engine", 2)
    run_ranks(of_torch, tmp_path / "torch", 2)
    for world_size in (1, 4):
        said = failure(engine, tmp_path / "engine", world_size)
        assert f"fits the 2 ranks that saved it, not {world_size}" in said
    assert "does not fit this job's model or optimizer" in failure(of_torch, tmp_path / "engine", 2)
    assert "no state of DeepSpeed's" in failure(engine, tmp_path / "torch", 2)


def test_what_the_engine_does_not_take_or_cannot_average_is_said(corpus: Path, tmp_path: Path) -> None:
    said = failure(job(corpus, {"zero_optimization": {"stage": 7}}), tmp_path / "stage", 1)
    assert "parallel.deepspeed: DeepSpeed does not take it: stage: " in said
    padded = job(corpus, ZERO_2, data={"packing": False})
    assert "averages over samples that all count alike" in failure(padded, tmp_path / "padded", 1)


def limits_of_groups(config_json: str, run: str) -> None:
    """Of the groups that the engine has made for itself: those of the start, and then that of a step."""
    import torch

    from train_jobs.parallel.mesh import AFTER_HANG_S

    config = TrainJobConfig.model_validate_json(config_json)
    assembly = assemble(config, Path(run))
    made = assembly.mesh._adopted
    assert made, "the engine has groups of its own"

    def limits() -> set[float]:
        backends = [group._get_backend(torch.device("cpu")) for group in made]
        return {backend.options._timeout.total_seconds() - AFTER_HANG_S for backend in backends}

    assert limits() == {5000.0}
    assembly.begin()
    assembly.loop.step()
    assert limits() == {70.0}


def test_its_own_groups_have_the_limit_of_the_start_and_then_that_of_a_step(
    corpus: Path, tmp_path: Path
) -> None:
    limits = {"start_timeout_s": 5000.0, "hang_timeout_s": 70.0}
    config = job(corpus, ZERO_2, recovery=limits)
    prepare_data(config, tmp_path / DATA)
    run_program(limits_of_groups, tmp_path, 2, config.model_dump_json(), str(tmp_path))
