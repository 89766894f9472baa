"""Losses that are no numbers, spikes and stragglers, in jobs of real processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.config import TrainJobConfig
from tests.train_jobs.bad_steps import (
    Case,
    save_as_before_there_were_guards,
    train_all,
    train_with_a_slow_rank,
    written,
)
from tests.train_jobs.ranks import reports, run_program, tiny_job, write_corpus
from train_jobs.data.preparation import prepare_data

NAN, INF = float("nan"), float("inf")
IMAGES: dict[str, Any] = {
    "task": "image_classification",
    "model": {"architecture": "resnet", "hidden_sizes": [4], "depths": [1], "embedding_size": 4},
    "batch": {"global": 8, "micro": 2},
    "steps": 6,
    "checkpoint": {"every_steps": 6},  # ranks take over rank 0's batch statistics when they save
}
SPIKE = {"policy": "skip", "window_steps": 8}


@dataclass
class Ended:
    """How a job ended, on all its ranks alike."""

    error: str | None
    step: int
    digests: list[list[dict[int, str]]]
    passed_over: list[int]
    said: list[dict[str, Any]]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [line for line in self.said if "kind" not in line]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.said if line.get("kind") == kind]


def cases(corpus: Path, directory: Path) -> dict[str, Case]:
    """All jobs of this file; those that end in `-oracle` never meet a bad step."""

    def case(name: str, config: TrainJobConfig, spoilt: dict[int, float], **oracle: Any) -> Case:
        run = directory / name
        prepare_data(config, run / "data")
        text = config.model_dump_json(by_alias=True)
        return Case(str(run), text, {str(batch): factor for batch, factor in spoilt.items()}, **oracle)

    def job(**changes: Any) -> TrainJobConfig:
        return tiny_job(corpus, **{"parallel": {"strategy": "fsdp"}, **changes})

    skip = {"non_finite_loss": "skip"}
    images = TrainJobConfig.model_validate({**IMAGES, "parallel": {"strategy": "ddp"}, "recovery": skip})
    back = job(checkpoint={"every_steps": 2}, recovery={"non_finite_loss": "go_back", "go_backs": 2}, steps=8)
    spiky = job(steps=14, recovery={"loss_spike": SPIKE})
    return {
        "stop": case("stop", job(), {3: NAN}),
        "skip": case("skip", images, {2: NAN, 3: INF}),
        "skip-oracle": case("skip-oracle", images, {}, leaves_out=[3, 4]),
        "skips": case("skips", job(recovery={**skip, "skips_in_a_row": 2}), dict.fromkeys(range(3, 8), NAN)),
        "back": case("back", back, {1: NAN, 5: INF}),
        "back-oracle": case("back-oracle", back, {}, takes=[0, 2, 3, 4, 6, 7, 8, 9]),
        "backs": case("backs", back, {3: NAN, 4: NAN, 5: NAN}),
        "spike": case("spike", spiky, {10: 30.0}),
        "spike-oracle": case("spike-oracle", spiky, {}, leaves_out=[11]),
        "warn": case(
            "warn", job(steps=14, recovery={"loss_spike": {**SPIKE, "policy": "warn"}}), {10: 30.0, 11: 30.0}
        ),
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


@pytest.fixture(scope="module")
def ended(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All jobs, run one after the other by the same two processes: to start these takes longest."""
    directory = tmp_path_factory.mktemp("jobs")
    jobs = cases(corpus, directory)
    run_program(train_all, directory, 2, written([*jobs.values()]))
    found = {}
    for name in jobs:
        run = directory / name
        one, other = (json.loads((run / f"end-{rank}.json").read_text()) for rank in (0, 1))
        digests = [one.pop("digests"), other.pop("digests")]
        assert one == other, "the ranks did not decide alike"
        found[name] = Ended(**one, digests=digests, said=reports(run))
    return found


def test_a_loss_that_is_no_number_ends_the_job_unless_the_config_says_otherwise(
    ended: dict[str, Ended],
) -> None:
    job = ended["stop"]
    assert (job.error, job.step) == ("LossError: the loss is nan in step 4", 3)
    assert [line["step"] for line in job.lines] == [1, 2, 3]


def test_a_skipped_step_leaves_the_state_as_if_it_had_not_been_done(ended: dict[str, Ended]) -> None:
    job, oracle = ended["skip"], ended["skip-oracle"]
    assert (job.error, job.step) == (None, 6)
    for mine, others in zip(job.digests, oracle.digests, strict=True):
        states, expected = dict(mine), dict(others)
        assert [states[step] for step in (2, 3, 4)] == [states[2]] * 3
        assert {step: states[step] for step in expected} == expected
        assert len(set(expected.values())) == 4
    for line, others in zip((job.lines[step - 1] for step in (1, 2, 5, 6)), oracle.lines, strict=True):
        assert (line["loss"], line["learning_rate"]) == (others["loss"], others["learning_rate"])
    assert [line.get("skipped") for line in job.lines] == [None, None, True, True, None, None]
    assert [line["loss"] for line in job.lines[2:4]] == [None, None]
    assert [(event["step"], event["reason"]) for event in job.events("step_skipped")] == [
        (3, "the loss is nan"),
        (4, "the loss is inf"),
    ]


def test_too_many_skipped_steps_in_a_row_end_the_job(ended: dict[str, Ended]) -> None:
    job = ended["skips"]
    assert job.error is not None
    assert job.error.startswith("LossError: the loss is nan in step 6, after 2 skipped steps in a row")


def test_going_back_leaves_what_a_run_without_the_bad_batches_would_have(ended: dict[str, Ended]) -> None:
    job, oracle = ended["back"], ended["back-oracle"]
    assert (job.error, job.step, job.passed_over) == (None, 8, [1, 5])
    for mine, others in zip(job.digests, oracle.digests, strict=True):
        # The last state that a step had; after it went back the first time it had done none.
        assert {step: states for step, states in mine if step} == dict(others)
    assert [(event["step"], event["to"], event["passed_over"]) for event in job.events("went_back")] == [
        (2, 0, [1]),
        (5, 4, [1, 5]),
    ]
    last = {line["step"]: line["loss"] for line in job.lines}
    assert last == {line["step"]: line["loss"] for line in oracle.lines}
    assert [event["step"] for event in job.events("evaluated")] == [4, 8], "none of them twice"


def test_a_job_that_went_back_too_often_ends(ended: dict[str, Ended]) -> None:
    job = ended["backs"]
    assert job.error is not None
    assert job.error.startswith("LossError: the loss is nan in step 4, and the job went back 2 times already")
    assert [(event["step"], event["to"]) for event in job.events("went_back")] == [(4, 2), (4, 2)]


def test_a_spike_is_skipped_before_it_does_harm(ended: dict[str, Ended]) -> None:
    job, oracle = ended["spike"], ended["spike-oracle"]
    assert job.error is None
    assert [line["step"] for line in job.lines if line.get("skipped")] == [11]
    assert job.lines[10]["loss"] > 10 * job.lines[9]["loss"]
    for mine, others in zip(job.digests, oracle.digests, strict=True):
        assert mine[-1] == others[-1]
    (event,) = job.events("step_skipped")
    assert "of the 8 steps before, the median is" in event["reason"]


def test_a_spike_that_is_only_warned_of_is_said_once_and_stepped(ended: dict[str, Ended]) -> None:
    job = ended["warn"]
    assert [event["step"] for event in job.events("loss_spike")] == [11]
    assert not any("skipped" in line for line in job.lines)
    states = [digest for _, digest in job.digests[0]]
    assert len(set(states)) == 14


def test_a_checkpoint_of_before_there_were_guards_is_loaded(corpus: Path, tmp_path: Path) -> None:
    config = tiny_job(corpus, recovery={"non_finite_loss": "go_back", "loss_spike": SPIKE})
    prepare_data(config, tmp_path / "data")
    run_program(save_as_before_there_were_guards, tmp_path, 1, config.model_dump_json(), str(tmp_path))
    assert [line["step"] for line in reports(tmp_path) if "kind" not in line] == [*range(1, 9)]


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_slow_rank_is_named_within_twenty_steps(strategy: str, corpus: Path, tmp_path: Path) -> None:
    config = tiny_job(
        corpus,
        parallel={"strategy": strategy},
        steps=70,
        optimizer={"learning_rate": 1e-3},
        checkpoint={"every_steps": 70},
    )
    prepare_data(config, tmp_path / "data")
    run_program(train_with_a_slow_rank, tmp_path, 2, config.model_dump_json(), str(tmp_path), 1, 20, 45)
    said = [line for line in reports(tmp_path) if str(line.get("kind")).startswith("straggler")]
    begun, over = said
    assert (begun["kind"], begun["rank"]) == ("straggler", 1)
    assert 20 <= begun["step"] < 40
    assert 2.0 <= begun["times_slower"] < 4.0
    assert (over["kind"], over["rank"]) == ("straggler_over", 1)
    assert 45 <= over["step"] < 65
