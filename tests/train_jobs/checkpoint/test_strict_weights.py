"""A checkpoint that lacks a weight of the model, or has it in another shape: nothing of it is taken."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from tests.train_jobs.checkpoint.test_unused_parameters import NEVER, job, module
from tests.train_jobs.ranks import assemble, finish, reports, some_steps, start_program
from tests.train_jobs.tasks.test_custom_task import EXAMPLE
from train_jobs.checkpoint.export import export_checkpoint
from train_jobs.errors import CheckpointError


def go_on(directory: str, config_json: str, run: str, out: str) -> None:
    """Say why a rank cannot go on, and why the model cannot be exported."""
    sys.path.insert(0, directory)
    config = TrainJobConfig.model_validate_json(config_json)
    assembly = assemble(config, Path(run), attempt=2)
    with pytest.raises(CheckpointError) as loading:
        assembly.begin()
    rank = torch.distributed.get_rank()
    told = {"loading": str(loading.value)}
    if rank == 0:
        with pytest.raises(CheckpointError) as exporting:
            export_checkpoint(Storage(run), config, None, Path(run, "model"))
        told["exporting"] = str(exporting.value)
        assert not Path(run, "model").exists()
    Path(f"{out}-{rank}.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("strategy", "ranks", "width", "words"),
    [
        ("ddp", 1, 32, "spare.weight"),
        ("ddp", 1, 48, "embedding.weight"),
        pytest.param("fsdp", 2, 32, "spare.weight", marks=pytest.mark.slow),
        pytest.param("fsdp", 2, 48, "embedding.weight", marks=pytest.mark.slow),
        pytest.param("zero1", 2, 32, "spare.weight", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_without_a_weight_of_the_model_is_refused(
    strategy: str, ranks: int, width: int, words: str, tmp_path: Path
) -> None:
    """Unlike one that lacks what the optimizer keeps of a parameter."""
    run = tmp_path / "run"
    parallel = {"strategy": strategy, "ddp": {"find_unused_parameters": True}}
    (tmp_path / "my_task.py").write_text(EXAMPLE)
    arguments = (str(tmp_path), job(parallel=parallel).model_dump_json(), str(run), 2, 1)
    finish(start_program(some_steps, run, ranks, *arguments))
    (tmp_path / "my_task.py").write_text(module(NEVER) if width == 32 else EXAMPLE)
    config = job(parallel=parallel, settings={"width": width})
    arguments = (str(tmp_path), config.model_dump_json(), str(run), str(tmp_path / "told"))
    finish(start_program(go_on, run, ranks, *arguments))
    for rank in range(ranks):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert "the checkpoint of step 2 does not fit this job's model or optimizer: " in told["loading"]
        assert words in told["loading"]
    told = json.loads((tmp_path / "told-0.json").read_text())
    assert "the checkpoint of step 2 is not one of this model: " in told["exporting"]
    assert words in told["exporting"]
    assert not [line for line in reports(run) if line.get("kind") == "checkpoint_rejected"], "it is whole"
