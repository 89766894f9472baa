"""Who is named as a straggler, how soon, and who is not."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train_jobs.metering.pace import Pace
from train_jobs.metering.stragglers import Change, Rank, StragglerWatch, _median_of_others

BOUND_STEPS = 20
Slowness = Callable[[int, int], float]
"""How many times slower a rank is in a step."""


def ranks(size: int, group: str | None = None) -> list[Rank]:
    return [(group, rank) for rank in range(size)]


def watched(
    size: int, steps: int, slowness: Slowness, noise: float = 0.3, seed: int = 0
) -> list[tuple[int, Change]]:
    """What is said in which step, of micro-batches of 50 ms with uniform noise."""
    chance, watch, said = np.random.default_rng(seed), StragglerWatch(2.0), []
    for step in range(steps):
        times = 0.05 * (1 + noise * chance.uniform(-1, 1, size))
        times *= [slowness(rank, step) for rank in range(size)]
        said += [(step, change) for change in watch.observe(ranks(size), times.tolist())]
    return said


@given(st.integers(2, 40), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_noise_names_nobody(size: int, seed: int) -> None:
    assert watched(size, 100, lambda rank, step: 1.0, seed=seed) == []


@given(st.integers(2, 40), st.integers(0, 60), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_rank_that_becomes_three_times_slower_is_named_within_the_bound_and_said_to_be_over(
    size: int, begins: int, seed: int
) -> None:
    slow, ends = seed % size, begins + 40
    said = watched(
        size, ends + 40, lambda rank, step: 3.0 if rank == slow and begins <= step < ends else 1.0, seed=seed
    )
    (named, begun), (released, over) = said
    assert begins <= named < begins + BOUND_STEPS
    assert (begun.rank, begun.begins) == ((None, slow), True)
    assert begun.times_slower is not None
    assert 2.0 <= begun.times_slower < 4.5
    assert ends <= released < ends + BOUND_STEPS
    assert (over.rank, over.begins, over.steps) == ((None, slow), False, released - named)


@given(st.integers(5, 40), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_of_two_slow_ranks_both_are_named(size: int, seed: int) -> None:
    said = watched(size, 40, lambda rank, step: 3.0 if rank < 2 else 1.0, seed=seed)
    assert {change.rank for _, change in said} == {(None, 0), (None, 1)}
    assert all(change.begins and step < BOUND_STEPS for step, change in said)


@given(st.integers(2, 12), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_pauses_once_in_a_while_name_nobody(size: int, seed: int) -> None:
    """Two steps of twelve take any rank fifty times as long: garbage, a page fault, a file that is read."""
    chance = np.random.default_rng(seed)
    pauses = {(rank, int(step)) for rank in range(size) for step in chance.choice(12, 2, replace=False)}
    assert watched(size, 60, lambda rank, step: 50.0 if (rank, step % 12) in pauses else 1.0, seed=seed) == []


def test_a_rank_that_stands_still_two_thirds_of_the_time_is_named() -> None:
    """As a process does that is stopped and continued: none of its steps takes three times as long."""
    said = watched(4, 60, lambda rank, step: 7.0 if rank == 1 and step % 3 == 0 else 1.0)
    assert [(change.rank, change.begins) for _, change in said] == [((None, 1), True)]
    assert said[0][0] < BOUND_STEPS


def test_one_rank_alone_is_never_named() -> None:
    assert watched(1, 60, lambda rank, step: 1.0 + step) == []


def test_steps_that_are_slower_on_all_ranks_name_nobody() -> None:
    assert watched(4, 80, lambda rank, step: 1.0 + step % 7) == []


def test_groups_come_and_go_and_those_that_stay_are_known() -> None:
    watch = StragglerWatch(2.0)
    two, three = ranks(1, "a") + ranks(1, "b"), ranks(1, "a") + ranks(1, "b") + ranks(1, "c")
    said = []
    for step in range(60):
        now = two if step < 9 or step >= 40 else three
        if step >= 50:
            now = ranks(1, "a") + ranks(1, "d")
        # A newcomer takes its state in its first step, and no micro-batch.
        times = [
            0.15 if group == "b" else 0.0 if (group, step) in (("c", 9), ("d", 50)) else 0.05
            for group, _ in now
        ]
        said += [(step, change) for change in watch.observe(now, times)]
    assert [(change.rank, change.begins) for _, change in said] == [(("b", 0), True), (("b", 0), False)]
    assert said[0][0] < BOUND_STEPS, "the change of groups in between made it no later"
    assert said[1] == (50, Change(("b", 0), False, None, 50 - said[0][0]))


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=30))
def test_the_median_of_the_others_is_just_that(values: list[float]) -> None:
    expected = [statistics.median_low(values[:index] + values[index + 1 :]) for index in range(len(values))]
    assert _median_of_others(np.asarray(values)).tolist() == expected


class Clock:
    """As if forward passes took so long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def take(self) -> float:
        return self.seconds


def test_a_rank_tells_its_time_at_its_place_one_step_later_and_data_counts_by_micro_batch() -> None:
    waited = iter([1.0, 1.6, 1.6, 1.6])
    pace = Pace(Clock(0.1), lambda: next(waited), 2.0, watches=False)  # type: ignore[arg-type]
    assert pace.row(1, 3) == [0.0, 0.0, 0.0]
    assert pace.take_in(ranks(3), [0.0, 0.0, 0.0], micro_batches=3) == []
    assert pace.row(1, 3) == [0.0, pytest.approx(0.1 + 0.6 / 3), 0.0]
    pace.take_in(ranks(3), [0.0, 0.0, 0.0], micro_batches=2)
    assert pace.row(0, 2) == [pytest.approx(0.1), 0.0]
    pace.take_in(ranks(3), [0.0, 0.0, 0.0], micro_batches=0)
    assert pace.row(0, 2) == [0.0, 0.0], "a rank without a micro-batch has no time"
