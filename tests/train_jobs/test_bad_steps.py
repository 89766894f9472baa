"""Losses that are no numbers, spikes and stragglers, in jobs of real processes."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
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


class Jobs:
    """Jobs with bad steps, and their oracles, which never meet one."""

    def __init__(self, corpus: Path, directory: Path) -> None:
        self.corpus = corpus
        self.directory = directory
        self.cases: dict[str, Case] = {}
        prepare_data(self.text(), directory / "data")

    def text(self, **changes: Any) -> TrainJobConfig:
        return tiny_job(self.corpus, **{"parallel": {"strategy": "fsdp"}, **changes})

    def images(self, **changes: Any) -> TrainJobConfig:
        return TrainJobConfig.model_validate({**IMAGES, "parallel": {"strategy": "ddp"}, **changes})

    def add(
        self, name: str, config: TrainJobConfig, spoilt: dict[int, float] | None = None, **oracle: Any
    ) -> None:
        run = self.directory / name
        if config.task == "causal_lm":
            shutil.copytree(self.directory / "data", run / "data")
        else:
            prepare_data(config, run / "data")
        factors = {str(batch): factor for batch, factor in (spoilt or {}).items()}
        self.cases[name] = Case(str(run), config.model_dump_json(by_alias=True), factors, **oracle)

    def run(self) -> dict[str, Ended]:
        """Run all of them one after the other in the same two processes: to start these takes longest."""
        run_program(train_all, self.directory, 2, written([*self.cases.values()]))
        found = {}
        for name in self.cases:
            run = self.directory / name
            one, other = (json.loads((run / f"end-{rank}.json").read_text()) for rank in (0, 1))
            digests = [one.pop("digests"), other.pop("digests")]
            assert one == other, "the ranks did not decide alike"
            found[name] = Ended(**one, digests=digests, said=reports(run))
        return found


BACK = {"non_finite_loss": "go_back", "go_backs": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


@pytest.fixture(scope="module")
def ended(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    jobs = Jobs(corpus, tmp_path_factory.mktemp("jobs"))
    jobs.add("stop", jobs.text(), {3: NAN})
    images = jobs.images(recovery={"non_finite_loss": "skip"})
    jobs.add("skip", images, {2: NAN, 3: INF})
    jobs.add("skip-oracle", images, leaves_out=[3, 4])
    back = jobs.text(checkpoint={"every_steps": 2}, recovery=BACK, steps=8)
    jobs.add("back", back, {1: NAN, 5: INF})
    jobs.add("back-oracle", back, takes=[0, 2, 3, 4, 6, 7, 8, 9])
    return jobs.run()


@pytest.fixture(scope="module")
def more_ended(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Those whose policies are tested without processes too."""
    jobs = Jobs(corpus, tmp_path_factory.mktemp("jobs"))
    skips = {"non_finite_loss": "skip", "skips_in_a_row": 2}
    jobs.add("skips", jobs.text(recovery=skips), dict.fromkeys(range(3, 8), NAN))
    jobs.add("backs", jobs.text(checkpoint={"every_steps": 2}, recovery=BACK), {3: NAN, 4: NAN, 5: NAN})
    spiky = jobs.text(steps=14, recovery={"loss_spike": SPIKE})
    jobs.add("spike", spiky, {10: 30.0})
    jobs.add("spike-oracle", spiky, leaves_out=[11])
    warned = jobs.text(steps=14, recovery={"loss_spike": {**SPIKE, "policy": "warn"}})
    jobs.add("warn", warned, {10: 30.0, 11: 30.0})
    for strategy in ("ddp", "zero1", "zero2", "zero3", "hsdp"):
        config = jobs.text(
            parallel={"strategy": strategy}, checkpoint={"every_steps": 2}, recovery=BACK, steps=8
        )
        jobs.add(strategy, config, {1: NAN, 5: INF})
        jobs.add(f"{strategy}-oracle", config, takes=[0, 2, 3, 4, 6, 7, 8, 9])
    return jobs.run()


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


@pytest.mark.slow
def test_too_many_skipped_steps_in_a_row_end_the_job(more_ended: dict[str, Ended]) -> None:
    job = more_ended["skips"]
    assert job.error is not None
    assert job.error.startswith("LossError: the loss is nan in step 6, after 2 skipped steps in a row")


def check_back(job: Ended, oracle: Ended) -> None:
    """A job that met bad batches 1 and 5, and a checkpoint every other step."""
    assert (job.error, job.step, job.passed_over) == (None, 8, [1, 5])
    for mine, others in zip(job.digests, oracle.digests, strict=True):
        # The last state that a step had; after it went back the first time it had done none.
        assert {step: state for step, state in mine if step} == dict(others)
    assert [(event["step"], event["to"], event["passed_over"]) for event in job.events("went_back")] == [
        (2, 0, [1]),
        (5, 4, [1, 5]),
    ]
    last = {line["step"]: line["loss"] for line in job.lines}
    assert last == {line["step"]: line["loss"] for line in oracle.lines}
    assert [event["step"] for event in job.events("evaluated")] == [4, 8], "none of them twice"


def test_going_back_leaves_what_a_run_without_the_bad_batches_would_have(ended: dict[str, Ended]) -> None:
    check_back(ended["back"], ended["back-oracle"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_going_back_does_so_under_every_strategy(strategy: str, more_ended: dict[str, Ended]) -> None:
    check_back(more_ended[strategy], more_ended[f"{strategy}-oracle"])


@pytest.mark.slow
def test_a_job_that_went_back_too_often_ends(more_ended: dict[str, Ended]) -> None:
    job = more_ended["backs"]
    assert job.error is not None
    assert job.error.startswith("LossError: the loss is nan in step 4, and the job went back 2 times already")
    assert [(event["step"], event["to"]) for event in job.events("went_back")] == [(4, 2), (4, 2)]


@pytest.mark.slow
def test_a_spike_is_skipped_before_it_does_harm(more_ended: dict[str, Ended]) -> None:
    job, oracle = more_ended["spike"], more_ended["spike-oracle"]
    assert job.error is None
    assert [line["step"] for line in job.lines if line.get("skipped")] == [11]
    assert job.lines[10]["loss"] > 10 * job.lines[9]["loss"]
    for mine, others in zip(job.digests, oracle.digests, strict=True):
        assert mine[-1] == others[-1]
    (event,) = job.events("step_skipped")
    assert "of the 8 steps before, the median is" in event["reason"]


@pytest.mark.slow
def test_a_spike_that_is_only_warned_of_is_said_once_and_stepped(more_ended: dict[str, Ended]) -> None:
    job = more_ended["warn"]
    assert [event["step"] for event in job.events("loss_spike")] == [11]
    assert not any("skipped" in line for line in job.lines)
    states = [digest for _, digest in job.digests[0]]
    assert len(set(states)) == 14


def test_a_checkpoint_of_before_there_were_guards_is_loaded(corpus: Path, tmp_path: Path) -> None:
    config = tiny_job(corpus, recovery={"non_finite_loss": "go_back", "loss_spike": SPIKE})
    prepare_data(config, tmp_path / "data")
    run_program(save_as_before_there_were_guards, tmp_path, 1, config.model_dump_json(), str(tmp_path))
    assert [line["step"] for line in reports(tmp_path) if "kind" not in line] == [*range(1, 9)]


def stragglers(corpus: Path, run: Path, strategy: str, steps: int, first: int, last: int) -> list[Any]:
    """What is said of rank 1 in a job in which it is slow in these steps.

    On a busy machine another one may be slow for a while, too.
    """
    config = tiny_job(
        corpus,
        parallel={"strategy": strategy},
        steps=steps,
        evaluate={"every_steps": None},
        checkpoint={"every_steps": steps},
    )
    prepare_data(config, run / "data")
    run_program(train_with_a_slow_rank, run, 2, config.model_dump_json(), str(run), 1, first, last)
    said = [line for line in reports(run) if str(line.get("kind")).startswith("straggler")]
    return [line for line in said if line["rank"] == 1]


@pytest.mark.slow
def test_a_slow_rank_is_named_within_twenty_steps(corpus: Path, tmp_path: Path) -> None:
    event, *_ = stragglers(corpus, tmp_path, "fsdp", 34, 14, 34)
    assert event["kind"] == "straggler"
    assert 14 <= event["step"] < 34
    assert 2.0 <= event["times_slower"] < 4.0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "hsdp"])
def test_a_rank_that_is_slow_for_a_while_is_said_to_be_over(
    strategy: str, corpus: Path, tmp_path: Path
) -> None:
    begun, over, *_ = stragglers(corpus, tmp_path, strategy, 70, 20, 45)
    assert begun["kind"] == "straggler"
    assert 20 <= begun["step"] < 40
    assert over["kind"] == "straggler_over"
    assert 45 <= over["step"] < 65
