"""Dropout: drawn for each rank's own samples, alike where ranks share them, and the same after a restart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble, finish, reports, start_program
from tests.train_jobs.tasks.test_custom_task import EXAMPLE
from tests.train_jobs.tasks.test_custom_task import job as example_job

DROPPING = EXAMPLE.replace(
    "        return self.head(self.rnn(self.embedding(inputs))[0])\n",
    "        dropped = nn.functional.dropout(torch.ones(64), 0.5, self.training)\n"
    "        if self.training:\n"
    "            self.drawn = (dropped > 0).int().tolist()\n"
    "        hidden = self.rnn(self.embedding(inputs))[0]\n"
    "        return self.head(nn.functional.dropout(hidden, 0.1, self.training))\n",
)


def job(**changes: Any) -> TrainJobConfig:
    defaults = {"steps": 6, "evaluate": {"every_steps": None}, "checkpoint": {"every_steps": 3}}
    return example_job(**{**defaults, **changes})


def some_steps(directory: str, config_json: str, run: str, until: int, attempt: int) -> None:
    """Train up to a step, noting what each step's last micro-batch drew."""
    import torch.distributed as dist

    sys.path.insert(0, directory)
    assembly = assemble(TrainJobConfig.model_validate_json(config_json), Path(run), attempt)
    assembly.begin()
    drawn = {}
    while assembly.state.step < until:
        assembly.loop.step()
        drawn[assembly.state.step] = assembly.parallel.stepped.drawn
    assembly.saver.save()
    assembly.saver.finish()
    Path(run, f"drawn-{attempt}-{dist.get_rank()}.json").write_text(json.dumps(drawn))


def train(directory: Path, run: str, ranks: int, *until: int, **changes: Any) -> list[dict[str, list[int]]]:
    """What each rank drew, by step."""
    (directory / "my_task.py").write_text(DROPPING)
    found: list[dict[str, list[int]]] = [{} for _ in range(ranks)]
    for attempt, step in enumerate(until, 1):
        arguments = (str(directory), job(**changes).model_dump_json(), str(directory / run), step, attempt)
        finish(start_program(some_steps, directory / run, ranks, *arguments))
        for rank in range(ranks):
            found[rank] |= json.loads((directory / run / f"drawn-{attempt}-{rank}.json").read_text())
    return found


def losses(directory: Path, run: str) -> list[float]:
    return [line["loss"] for line in reports(directory / run) if "kind" not in line]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_drop_out_different_units(tmp_path: Path, strategy: str) -> None:
    assert DROPPING != EXAMPLE
    one, other = train(tmp_path, "run", 2, 6, parallel={"strategy": strategy})
    assert len(one) == 6
    for step in one:
        assert one[step] != other[step], f"step {step}"
    assert len({str(each) for rank in (one, other) for each in rank.values()}) == 12, "nor from step to step"


def test_a_restart_draws_what_would_have_been_drawn(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", 2, 6, parallel={"strategy": "ddp"})
    parts = train(tmp_path, "parts", 2, 3, 6, parallel={"strategy": "ddp"})
    assert whole == parts
    assert losses(tmp_path, "whole") == losses(tmp_path, "parts")


def test_a_rank_that_was_not_there_before_draws_anew_and_like_nobody_else(tmp_path: Path) -> None:
    train(tmp_path, "run", 1, 3)
    arguments = (
        str(tmp_path),
        job(parallel={"strategy": "ddp"}).model_dump_json(),
        str(tmp_path / "run"),
        6,
        2,
    )
    finish(start_program(some_steps, tmp_path / "run", 2, *arguments))
    first = json.loads((tmp_path / "run" / "drawn-1-0.json").read_text())
    ranks = [json.loads((tmp_path / "run" / f"drawn-2-{rank}.json").read_text()) for rank in (0, 1)]
    drawn = [str(each) for found in (first, *ranks) for each in found.values()]
    assert len(drawn) == len(set(drawn)) == 9
