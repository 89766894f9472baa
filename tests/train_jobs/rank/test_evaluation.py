"""What is evaluated, when, and what is kept whatever comes of it."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from tests.train_jobs.ranks import assemble, finish, reports, start_program
from tests.train_jobs.tasks.test_custom_task import EXAMPLE
from tests.train_jobs.tasks.test_custom_task import job as example_job
from train_jobs.checkpoint.export import export_checkpoint
from train_jobs.checkpoint.store import CheckpointStore
from train_jobs.spec import EXPORT_FACTS

NONE_HELD_OUT = EXAMPLE.replace("        cut =", "        if held_out:\n            return []\n        cut =")
LOSS = "    def loss(self, model, batch):\n"
BREAKS = """
        if not model.training:
            raise OSError("it cannot be evaluated")
"""
WORSE = """
        self.calls = getattr(self, "calls", 0) + model.training
        factor = 1.0 if model.training else {4: 1.0, 8: 0.5, 12: 2.0, 16: float("nan")}[self.calls // 4]
"""


def job(**changes: Any) -> TrainJobConfig:
    defaults = {"steps": 8, "evaluate": {"every_steps": 4}, "checkpoint": {"every_steps": 4}}
    return example_job(**{**defaults, **changes})


def with_loss(lines: str) -> str:
    """The documentation's task, whose loss does something more at its beginning."""
    before, found, after = EXAMPLE.partition(LOSS)
    assert found
    return before + LOSS + lines + after


def whole(directory: str, config_json: str, run: str, attempt: int, outcome: str) -> None:
    """A rank from its beginning to its end, or to the exception that is named."""
    sys.path.insert(0, directory)
    with pytest.raises(Exception, match=outcome) if outcome else nullcontext():
        assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run), attempt)
        assembly.begin()
        assert assembly.loop.run() == "finished"
        assembly.export()


def export(directory: str, config_json: str, step: int, name: str) -> None:
    sys.path.insert(0, directory)
    run, config = Storage(Path(directory, "run")), TrainJobConfig.model_validate_json(config_json)
    export_checkpoint(run, config, step, Path(directory, name))


def train(
    directory: Path, module: str, config: TrainJobConfig, outcome: str = "", attempt: int = 1, ranks: int = 1
) -> list[dict[str, Any]]:
    (directory / "my_task.py").write_text(module)
    run = directory / "run"
    run.mkdir(exist_ok=True)
    arguments = (str(directory), config.model_dump_json(), str(run), attempt, outcome)
    finish(start_program(whole, run, ranks, *arguments))
    lines = reports(run) if (run / "reports.jsonl").exists() else []
    return [line for line in lines if line.get("attempt", attempt) == attempt]


def store_of(directory: Path) -> CheckpointStore:
    return CheckpointStore(Storage(directory / "run" / "checkpoints"))


def kinds(lines: list[dict[str, Any]], kind: str) -> list[int]:
    return [line["step"] for line in lines if line.get("kind") == kind]


def test_a_task_without_held_out_samples_is_refused_before_its_first_step(tmp_path: Path) -> None:
    assert NONE_HELD_OUT != EXAMPLE
    lines = train(tmp_path, NONE_HELD_OUT, job(), "the task gives no held-out sample")
    assert [line for line in lines if "loss" in line] == []


def test_a_job_that_evaluates_nothing_needs_no_held_out_samples(tmp_path: Path) -> None:
    lines = train(tmp_path, NONE_HELD_OUT, job(evaluate={"every_steps": None}))
    assert [line["step"] for line in lines if "kind" not in line] == [*range(1, 9)]
    assert kinds(lines, "evaluated") == []
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


def test_what_was_trained_is_kept_where_its_evaluation_fails(tmp_path: Path) -> None:
    config = job(evaluate={"every_steps": 100})
    train(tmp_path, with_loss(BREAKS), config, "it cannot be evaluated")
    assert store_of(tmp_path).newest() == 8
    lines = train(tmp_path, with_loss(BREAKS), job(evaluate={"every_steps": None}), attempt=2)
    assert [line for line in lines if "kind" not in line] == [], "nothing was left to do"
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_each_checkpoint_knows_the_evaluation_of_its_step(
    tmp_path: Path, ranks: int, asynchronous: bool
) -> None:
    saves = {"every_steps": 4, "keep": 3, "asynchronous": asynchronous}
    lines = train(tmp_path, EXAMPLE, job(checkpoint=saves), ranks=ranks)
    told = {line["step"]: line["loss"] for line in lines if line.get("kind") == "evaluated"}
    assert [*told] == [4, 8]
    checkpoints = {each.step: each.metric("loss") for each in store_of(tmp_path).all()}
    assert checkpoints == told
    assert [line["evaluation"]["loss"] for line in lines if line.get("kind") == "exported"] == [told[8]]


def test_the_best_checkpoint_is_what_is_exported_when_that_is_asked_for(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    module = with_loss(WORSE).replace("return Sums(loss,", "return Sums(loss * factor,")
    saves = {"every_steps": 4, "keep": 1, "keep_best": 1}
    config = job(steps=16, checkpoint=saves, publish="m", publish_best=True)
    lines = train(tmp_path, module, config)
    losses = {line["step"]: line["loss"] for line in lines if line.get("kind") == "evaluated"}
    assert losses[8] < losses[4] < losses[12], losses
    assert math.isnan(losses[16])
    store = store_of(tmp_path)
    assert store.steps() == [8, 16]
    (exported,) = [line for line in lines if line.get("kind") == "exported"]
    assert (exported["step"], exported["evaluation"]["loss"]) == (8, losses[8])
    facts = json.loads((tmp_path / "run" / EXPORT_FACTS).read_text())
    assert (facts["step"], facts["evaluation"]["loss"]) == (8, losses[8])
    best = load_file(tmp_path / "run" / "export" / "model.safetensors")
    for step, name in ((8, "eight"), (16, "last")):
        finish(start_program(export, tmp_path, 1, str(tmp_path), config.model_dump_json(), step, name))
    eight, last = (load_file(tmp_path / name / "model.safetensors") for name in ("eight", "last"))
    assert all(torch.equal(best[name], eight[name]) for name in eight)
    assert not all(torch.equal(best[name], last[name]) for name in last)


def test_a_metric_that_the_task_does_not_give_is_said_at_the_first_evaluation(tmp_path: Path) -> None:
    saves = {"every_steps": 4, "keep_best": 1, "metric": "f1", "greater_is_better": True}
    lines = train(
        tmp_path,
        EXAMPLE,
        job(checkpoint=saves),
        "this task's evaluations have no `f1`; they have loss, accuracy, perplexity",
    )
    assert max(line["step"] for line in lines if "kind" not in line) == 4
    assert store_of(tmp_path).newest() in (None, 4)
