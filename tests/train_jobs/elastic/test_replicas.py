"""Replica groups of real processes: they join, leave, are killed and hang, and nothing of a step is lost."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from tests.train_jobs.bad_steps import Case, train_all, written
from tests.train_jobs.elastic.groups import Groups
from tests.train_jobs.ranks import (
    loss_of_export,
    merged,
    reports,
    run_program,
    run_ranks,
    tiny_job,
    write_corpus,
)
from train_jobs.checkpoint.store import CheckpointStore
from train_jobs.data.preparation import prepare_data
from train_jobs.spec import CHECKPOINTS

# A rank sums its own micro-batches before the groups' sums are added: the same fp32 numbers in another order.
# A loss near 6 then differs by a few units in the last place (4.8e-7 each) in a step, and what differs feeds
# back through the weights: over 60 steps with a small learning rate by no more than this.
TOLERANCE = 5e-5

JOB: dict[str, Any] = {
    "workers": {"min": 1, "max": 3},
    "batch": {"global": 16, "micro": 2},
    "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5},
    "steps": 60,
    "evaluate": {"every_steps": 20},
    "checkpoint": {"every_steps": 20},
    "recovery": {"heartbeat_timeout_s": 3.0},
}

PATIENT_S = 10.0
"""The heartbeat timeout where nobody is to be lost, however busy the machine is."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.parquet")


def alone(config: TrainJobConfig, run: Path) -> list[dict[str, Any]]:
    """The undisturbed run of one process."""
    one = {**config.model_dump(), "workers": {"min": 1}, "parallel": {"strategy": "ddp"}}
    return run_ranks(TrainJobConfig.model_validate(one), run, world_size=1)


def check_steps(groups: Groups, reference: list[dict[str, Any]]) -> None:
    """Every step once, in order, with the samples and the loss that it has undisturbed."""
    last = {line["step"]: line for line in groups.lines()}  # of a step done again, the last counts
    assert sorted(last) == [line["step"] for line in reference]
    for line, other in zip((last[step] for step in sorted(last)), reference, strict=True):
        for key in ("samples", "tokens", "learning_rate"):
            assert line[key] == other[key]
        assert line["loss"] == pytest.approx(other["loss"], abs=TOLERANCE)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], abs=20 * TOLERANCE)
    assert all(len(states) == 1 for states in groups.digests().values()), "the groups' states differ"


def test_three_groups_share_eight_micro_batches_and_step_as_one_process_does(
    corpus: Path, tmp_path: Path
) -> None:
    config = tiny_job(corpus, **merged(JOB, {"steps": 12, "evaluate": {"every_steps": 6}}))
    groups = Groups(config, tmp_path / "run", ["a", "b", "c"])
    groups.start("a", "b", "c")
    ended = groups.wait("a", "b", "c")
    check_steps(groups, alone(config, tmp_path / "alone"))
    assert {end["outcome"] for end in ended} == {"finished"}
    assert sum(end["leads"] for end in ended) == 1
    assert {line["world_size"] for line in groups.lines()} == {3}
    assert [event["step"] for event in groups.events("evaluated")] == [6, 12]
    loss, tokens = loss_of_export(config, tmp_path / "run")
    evaluated = groups.events("evaluated")[-1]
    assert (evaluated["loss"], evaluated["tokens"]) == (pytest.approx(loss, abs=1e-5), tokens)


@pytest.mark.slow
def test_a_group_joins_one_leaves_and_one_is_killed_while_the_others_go_on(
    corpus: Path, tmp_path: Path
) -> None:
    config = tiny_job(corpus, **JOB)
    groups = Groups(config, tmp_path / "run", ["a", "b"], pace_s=0.1)
    groups.start("a", "b")
    groups.at_step(3)
    groups.start("c")
    joined = groups.changed(1)
    assert (joined["joined"], joined["world_size"]) == (["c"], 3)
    groups.at_step(joined["step"] + 3)
    groups.leave("a")  # the one that wrote logs and checkpoints
    left = groups.changed(2)
    assert (left["left"], left["lost"]) == (["a"], [])
    assert [end["outcome"] for end in groups.wait("a")] == ["left"]
    groups.at_step(left["step"] + 3)
    groups.kill("c")
    lost = groups.changed(3)
    assert (lost["left"], lost["lost"], lost["world_size"]) == ([], ["c"], 1)
    groups.wait("b")
    check_steps(groups, alone(config, tmp_path / "alone"))
    assert CheckpointStore(Storage(groups.run).child(CHECKPOINTS)).steps() == [20, 40, 60]


@pytest.mark.slow
def test_a_group_that_stood_still_does_not_step_beside_the_one_that_took_its_place(
    corpus: Path, tmp_path: Path
) -> None:
    config = tiny_job(corpus, **merged(JOB, {"steps": 90}))
    groups = Groups(config, tmp_path / "run", ["a"], pace_s=0.1)
    groups.start("a")
    groups.at_step(23)
    groups.stop("a")
    groups.start("b")
    assert groups.changed(1)["lost"] == ["a"]
    groups.stop("a", signal.SIGCONT)
    back = groups.changed(2)
    assert {"a", "b"} >= set(back["joined"]) > set()
    assert set(back["members"]) == {"a", "b"}
    groups.wait("a", "b")
    check_steps(groups, alone(config, tmp_path / "alone"))
    lines = groups.lines()
    first = next(index for index, line in enumerate(lines) if line["group"] == "b")
    together = next(index for index, line in enumerate(lines) if line["world_size"] == 2)
    assert {line["group"] for line in lines[first:together]} == {"b"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "tensor": 2},
        {"strategy": "ddp"},
        {"strategy": "ddp", "tensor": 2},
        {"strategy": "zero2", "fsdp": {"reduce_every_micro_batch": True}},
        {"strategy": "hsdp", "shard": 1},
    ],
    ids=lambda parallel: "-".join(map(str, parallel.values())),
)
def test_groups_of_two_ranks_join_and_are_killed(
    parallel: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    config = tiny_job(corpus, **merged(JOB, {"workers": {"min": 2, "max": 6, "group": 2}}), parallel=parallel)
    groups = Groups(config, tmp_path / "run", ["a", "b"], pace_s=0.1)
    groups.start("a", "b", size=2)
    groups.at_step(3)
    groups.start("c", size=2)
    joined = groups.changed(1)
    groups.at_step(joined["step"] + 3)
    groups.kill("b", rank=1)
    assert groups.changed(2)["lost"] == ["b"]
    groups.at_step(groups.lines()[-1]["step"] + 3)
    groups.leave("a")
    groups.wait("a", "c")
    reference = {**config.model_dump(), "parallel": {"strategy": "ddp"}, "workers": {"min": 1}}
    check_steps(groups, run_ranks(TrainJobConfig.model_validate(reference), tmp_path / "alone", world_size=1))


@pytest.mark.slow
def test_losses_of_a_fixed_number_of_groups_are_bit_equal(corpus: Path, tmp_path: Path) -> None:
    config = tiny_job(corpus, **merged(JOB, {"workers": {"min": 2, "max": 2, "group": 1}, "steps": 20}))
    losses = []
    for run in ("one", "two"):
        groups = Groups(config, tmp_path / run, ["a", "b"])
        groups.start("a", "b")
        groups.wait("a", "b")
        losses.append([(line["loss"], line["grad_norm"]) for line in groups.lines()])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_group_that_hangs_is_lost_after_the_heartbeat_timeout_and_may_come_back(
    corpus: Path, tmp_path: Path
) -> None:
    config = tiny_job(corpus, **merged(JOB, {"steps": 100}))
    groups = Groups(config, tmp_path / "run", ["a", "b", "c"], pace_s=0.1)
    groups.start("a", "b", "c")
    groups.at_step(5)
    groups.stop("b")
    assert groups.changed(1)["lost"] == ["b"]
    groups.at_step(groups.lines()[-1]["step"] + 5)
    groups.stop("b", signal.SIGCONT)
    assert groups.changed(2)["joined"] == ["b"]
    groups.wait("a", "b", "c")
    check_steps(groups, alone(config, tmp_path / "alone"))


SAVING: dict[str, Any] = {
    "recovery": {"hang_timeout_s": 10.0},
    "steps": 30,
    "evaluate": {"every_steps": None},
    "profile_every_steps": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_the_others_wait_for_a_group_that_saves_longer_than_a_step_may_take(
    size: int, corpus: Path, tmp_path: Path
) -> None:
    parallel = {"strategy": "fsdp" if size == 2 else "ddp"}
    workers = {"min": size, "max": 3 * size, "group": size}
    config = tiny_job(corpus, **merged(merged(JOB, SAVING), {"workers": workers}), parallel=parallel)
    groups = Groups(config, tmp_path / "run", ["a", "b"], saving=("a", 25.0))
    groups.start("a", "b", size=size)
    groups.saves("a", 20)
    groups.start("c", size=size)  # it meets the others when the save is over
    ended = groups.wait("a", "b", "c")
    assert [end["outcome"] for end in ended] == ["finished"] * 3 * size
    assert groups.events("resized")[0]["joined"] == ["c"]
    assert not any(event["lost"] for event in groups.events("resized"))
    check_steps(groups, alone(config, tmp_path / "alone"))


@pytest.mark.slow
def test_a_group_that_dies_while_it_saves_is_lost_and_another_saves(corpus: Path, tmp_path: Path) -> None:
    config = tiny_job(corpus, **merged(JOB, SAVING))
    groups = Groups(config, tmp_path / "run", ["a", "b"], saving=("a", 600.0))
    groups.start("a", "b")
    groups.saves("a", 20)
    time.sleep(1.5 * config.recovery.hang_timeout_s)
    groups.kill("a")
    assert groups.changed(1)["lost"] == ["a"]
    groups.wait("b")
    check_steps(groups, alone(config, tmp_path / "alone"))
    assert CheckpointStore(Storage(groups.run).child(CHECKPOINTS)).steps() == [21, 30]


@pytest.mark.slow
def test_a_job_that_lost_all_its_groups_goes_on_from_the_newest_checkpoint(
    corpus: Path, tmp_path: Path
) -> None:
    config = tiny_job(corpus, **JOB)
    groups = Groups(config, tmp_path / "run", ["a", "b"], pace_s=0.05)
    groups.start("a", "b")
    groups.at_step(25)
    groups.stop("b")  # so that it has no time to take over from the other
    groups.kill("a")
    groups.kill("b")
    groups.start("c")
    groups.wait("c")
    first = next(line for line in groups.lines() if line["group"] == "c")
    assert first["step"] == 21
    check_steps(groups, alone(config, tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_random_changes_lose_and_repeat_no_step(seed: int, corpus: Path, tmp_path: Path) -> None:
    chance = random.Random(seed)
    config = tiny_job(corpus, **merged(JOB, {"steps": 600, "optimizer": {"learning_rate": 1e-4}}))
    groups = Groups(config, tmp_path / "run", ["g0"], pace_s=0.05)
    groups.start("g0")
    running = ["g0"]
    for number in range(1, 21):
        groups.at_step((groups.lines() or [{"step": 0}])[-1]["step"] + chance.randint(1, 8))
        kinds = ["join"] * (len(running) < 3) + ["leave", "kill"] * (len(running) > 1)
        kind = chance.choice(kinds)
        if kind == "join":
            running.append(f"g{number}")
            groups.start(running[-1])
        else:
            name = running.pop(chance.randrange(len(running)))
            groups.leave(name) if kind == "leave" else groups.kill(name)
        groups.changed(number)
    groups.wait(*running)
    check_steps(groups, alone(config, tmp_path / "alone"))
    repeated = len(groups.lines()) - config.steps
    assert repeated <= 1, "only a step that its first group did not live to share is done again"


def check_alike(groups: Groups) -> None:
    """All groups came to the same state in every step."""
    assert all(len(states) == 1 for states in groups.digests().values()), "the groups' states differ"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_all_groups_skip_the_same_steps(size: int, corpus: Path, tmp_path: Path) -> None:
    parallel = {"strategy": "fsdp" if size == 2 else "ddp"}
    changes = {
        "workers": {"min": size, "max": 3 * size, "group": size},
        "recovery": {"non_finite_loss": "skip", "heartbeat_timeout_s": PATIENT_S},
        "steps": 20,
    }
    config = tiny_job(corpus, **merged(JOB, changes), parallel=parallel)
    spoilt = {4: float("nan"), 5: float("inf")}
    groups = Groups(config, tmp_path / "run", ["a", "b"], timeout_s=PATIENT_S, spoilt=spoilt)
    groups.start("a", "b", size=size)
    groups.wait("a", "b")
    lines = groups.lines()
    assert [line["step"] for line in lines] == [*range(1, 21)]
    assert [line["step"] for line in lines if line.get("skipped")] == [5, 6]
    check_alike(groups)
    states = [groups.digests()[0, step, 2 * size] for step in (4, 5, 6, 7)]
    assert states[0] == states[1] == states[2] != states[3]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_all_groups_go_back_together_and_one_that_joins_later_passes_over_the_same_batches(
    size: int, corpus: Path, tmp_path: Path
) -> None:
    parallel = {"strategy": "fsdp" if size == 2 else "ddp"}
    changes = {
        "workers": {"min": size, "max": 3 * size, "group": size},
        "recovery": {"non_finite_loss": "go_back", "heartbeat_timeout_s": PATIENT_S},
        "checkpoint": {"every_steps": 5},
        "steps": 60,
    }
    config = tiny_job(corpus, **merged(JOB, changes), parallel=parallel)
    spoilt = {7: float("nan"), 10: float("nan"), 45: float("inf")}
    groups = Groups(config, tmp_path / "run", ["a", "b"], timeout_s=PATIENT_S, pace_s=0.1, spoilt=spoilt)
    groups.start("a", "b", size=size)
    groups.at_step(12)
    groups.start("c", size=size)
    assert groups.changed(1)["joined"] == ["c"]
    ended = groups.wait("a", "b", "c")
    assert {end["outcome"] for end in ended} == {"finished"}
    back = [(event["step"], event["to"], event["passed_over"]) for event in groups.events("went_back")]
    # Batch 10 is taken by step 10 (from 1), batch 7 being passed over; batch 45 by step 44.
    assert back == [(8, 5, [7]), (10, 5, [7, 10]), (44, 40, [7, 10, 45])]
    last = {line["step"]: line for line in groups.lines()}
    takes = [batch for batch in range(63) if batch not in spoilt]
    oracle = undisturbed(config, tmp_path / "oracle", takes)
    assert sorted(last) == sorted(oracle) == [*range(1, 61)]
    for step, line in last.items():
        assert line["loss"] == pytest.approx(oracle[step]["loss"], abs=TOLERANCE)
    final = {key: states for key, states in groups.digests().items() if key[1] == 60}
    assert all(len(states) == 1 for states in final.values())


def undisturbed(config: TrainJobConfig, run: Path, takes: list[int]) -> dict[int, dict[str, Any]]:
    """The lines of one process that never takes the batches that the groups passed over."""
    one = {**config.model_dump(), "workers": {"min": 1}, "parallel": {"strategy": "ddp"}}
    alone = TrainJobConfig.model_validate(one)
    prepare_data(alone, run / "data")
    case = Case(str(run), alone.model_dump_json(by_alias=True), takes=takes)
    run_program(train_all, run, 1, written([case]))
    return {line["step"]: line for line in reports(run) if "kind" not in line}


@pytest.mark.slow
def test_a_slow_group_is_named(corpus: Path, tmp_path: Path) -> None:
    recovery = {"heartbeat_timeout_s": PATIENT_S}
    config = tiny_job(corpus, **merged(JOB, {"workers": {"max": 2}, "steps": 30, "recovery": recovery}))
    groups = Groups(config, tmp_path / "run", ["a", "b"], timeout_s=PATIENT_S, slow="b")
    groups.start("a", "b")
    groups.wait("a", "b")
    event = next(each for each in groups.events("straggler") if each["group"] == "b")
    assert event["rank"] == 0
    assert event["step"] <= 20
    assert 2.0 <= event["times_slower"] < 4.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_groups_that_are_killed_and_join_while_the_job_goes_back_leave_no_trace(
    seed: int, corpus: Path, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    changes = {
        # Whoever meets a group that is killed at that very moment waits for it so long.
        "recovery": {"non_finite_loss": "go_back", "hang_timeout_s": 10.0},
        "optimizer": {"learning_rate": 1e-4},
        "checkpoint": {"every_steps": 5},
        "steps": 70,
    }
    config = tiny_job(corpus, **merged(JOB, changes))
    spoilt = dict.fromkeys((7, 15, 23, 31, 39, 47), float("nan"))
    groups = Groups(config, tmp_path / "run", ["g0", "g1"], pace_s=0.05, spoilt=spoilt)
    groups.start("g0", "g1")
    running = ["g0", "g1"]
    for number, batch in enumerate(sorted(spoilt)):
        groups.at_step(batch - number - 1)
        time.sleep(chance.uniform(0.0, 0.4))  # before it goes back, meanwhile, or soon after
        if len(running) > 1:
            groups.kill(running.pop(chance.randrange(len(running))))
        running.append(f"g{number + 2}")
        groups.start(running[-1])
    groups.wait(*running)
    last = {line["step"]: line for line in groups.lines()}
    oracle = undisturbed(config, tmp_path / "oracle", [batch for batch in range(76) if batch not in spoilt])
    assert sorted(last) == sorted(oracle)
    for step, line in last.items():
        assert line["loss"] == pytest.approx(oracle[step]["loss"], abs=TOLERANCE)
    assert all({*event["passed_over"]} <= {*spoilt} for event in groups.events("went_back"))
    final = {key: states for key, states in groups.digests().items() if key[1] == 70}
    assert all(len(states) == 1 for states in final.values())
