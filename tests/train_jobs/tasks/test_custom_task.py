"""A task of the user's: the example of the documentation, and what a class may lack."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from tests.train_jobs.ranks import assemble, finish, reports, start_program
from train_jobs.tasks import make_task

README = Path(__file__).parents[3] / "train_jobs" / "tasks" / "README.md"
EXAMPLE = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]


def job(**changes: Any) -> TrainJobConfig:
    return TrainJobConfig.model_validate(
        {
            "task": "my_task:Task",
            "steps": 60,
            "batch": {"global": 8, "micro": 2},
            "optimizer": {"learning_rate": 1e-2},
            "evaluate": {"every_steps": 30},
            "checkpoint": {"every_steps": 30},
            **changes,
        }
    )


def train_beside(directory: str, config_json: str, run: str) -> None:
    """A rank whose working directory holds the task's module."""
    sys.path.insert(0, directory)
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run))
    assembly.begin()
    assert assembly.loop.run() == "finished"
    assembly.export()


def train(directory: Path, run: Path, world_size: int, config: TrainJobConfig) -> list[dict[str, Any]]:
    run.mkdir()
    finish(start_program(train_beside, run, world_size, str(directory), config.model_dump_json(), str(run)))
    return reports(run)


@pytest.mark.slow
def test_the_example_is_short_and_trains_alike_under_any_strategy(tmp_path: Path) -> None:
    assert len(EXAMPLE.splitlines()) < 60
    (tmp_path / "my_task.py").write_text(EXAMPLE)
    alone = train(tmp_path, tmp_path / "alone", 1, job(settings={"width": 24}))
    many = train(tmp_path, tmp_path / "many", 2, job(settings={"width": 24}, parallel={"strategy": "fsdp"}))
    assert (tmp_path / "alone" / "export" / "model.safetensors").exists()
    losses = [[line["loss"] for line in each if "kind" not in line] for each in (alone, many)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0][-1] < losses[0][0] - 1
    # By kind, since checkpoints are reported from a thread, before or after the lines beside them.
    evaluations = [[line for line in each if line.get("kind") == "evaluated"] for each in (alone, many)]
    assert [line["step"] for line in evaluations[0]] == [30, 60]
    for one, other in zip(*evaluations, strict=True):
        assert one["step"] == other["step"]
        assert one["tokens"] == other["tokens"]
        assert one["accuracy"] == pytest.approx(other["accuracy"], abs=0.01)
        assert one["perplexity"] > 1


@pytest.mark.slow
def test_a_task_that_builds_on_meta_trains_as_if_it_did_not(tmp_path: Path) -> None:
    own = EXAMPLE.replace("class Task:\n", "class Task:\n    builds_on_meta = True\n")
    assert own != EXAMPLE
    config = job(steps=6, parallel={"strategy": "fsdp"})
    losses = []
    for name, module in (("whole", EXAMPLE), ("on_meta", own)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_task.py").write_text(module)
        lines = train(tmp_path / name, tmp_path / f"{name}-run", 2, config)
        losses.append([line["loss"] for line in lines if "kind" not in line])
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


def test_what_is_wrong_with_a_class_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "half_task.py").write_text("class Task:\n    def build(self): pass\n")
    for task, words in (
        ("nowhere:Task", "task 'nowhere:Task' cannot be imported: No module named 'nowhere'"),
        ("half_task:Tusk", "task 'half_task:Tusk' cannot be imported: .* has no attribute 'Tusk'"),
        ("half_task:Task", "task 'half_task:Task' has no method samples and no loss"),
    ):
        with pytest.raises(RequestError, match=words):
            make_task(job(task=task), tmp_path)
