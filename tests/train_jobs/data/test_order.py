"""The order of samples: from (seed, epoch, position) alone, whatever the number of workers."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train_jobs.data.arrangements import WHOLE, Arrangement, LengthGrouped, Order, Shuffled, Windowed
from train_jobs.data.order import BatchPlan, Place, SampleOrder, evaluation_share
from train_jobs.data.permutation import Permutation


def taken(order: SampleOrder, plan: BatchPlan, step: int, size: int) -> list[int]:
    """What all ranks of a step take, in rank order."""
    places = [Place(index, size) for index in range(size)]
    return [order.at(p) for place in places for batch in plan.micro_batches(step, place) for p in batch]


def test_one_two_and_four_workers_read_the_same_samples_in_the_same_order() -> None:
    order, plan = SampleOrder(Shuffled(1000), seed=7), BatchPlan(global_size=32, micro=4)
    for step in range(70):  # more than two epochs
        alone = taken(order, plan, step, 1)
        assert taken(order, plan, step, 2) == alone
        assert taken(order, plan, step, 4) == alone


arrangements = st.one_of(
    st.integers(1, 300).map(Shuffled),
    st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 5))
    .filter(lambda case: sum(case[0]) > 0)
    .map(lambda case: Windowed(*case)),
    st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(1, 8)).map(
        lambda case: LengthGrouped(len(case[0]), np.asarray(case[0]).__getitem__, case[1])
    ),
)


@settings(deadline=None)
@given(arrangements, st.integers(0, 2**40), st.integers(0, 3))
def test_an_epoch_holds_every_sample_once(arrangement: Arrangement, seed: int, epoch: int) -> None:
    order = list(arrangement.epoch(seed, epoch))
    assert sorted(order) == list(range(arrangement.num_samples))
    assert order == list(arrangement.epoch(seed, epoch))


@settings(deadline=None)
@given(
    arrangements,
    st.integers(1, 4),
    st.integers(0, 2**40),
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 6), st.integers(0, 3)), max_size=20),
)
def test_resizes_and_kills_neither_repeat_nor_skip_a_sample(
    arrangement: Arrangement, micro: int, seed: int, history: list[tuple[int, int, int]]
) -> None:
    """A job's history: so many steps at so many ranks, then a kill that throws it back a few steps."""
    order, plan = SampleOrder(arrangement, seed), BatchPlan(micro * 12, micro)
    step, counted = 0, {}
    for size, steps, lost in history:
        for _ in range(steps):
            counted[step] = taken(order, plan, step, size)  # of a step done again, the last counts
            step += 1
        step = max(0, step - lost)
    done = len(counted) * plan.global_size
    samples = [sample for step in sorted(counted) for sample in counted[step]]
    epochs, rest = divmod(done, arrangement.num_samples)
    whole = Counter(samples[: epochs * arrangement.num_samples])
    assert whole == Counter({sample: epochs for sample in range(arrangement.num_samples) if epochs})
    assert len(set(samples[done - rest :])) == rest


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.integers(0, 2**40),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=12),
)
def test_other_global_batches_neither_repeat_nor_skip_a_sample(
    num_samples: int, seed: int, history: list[tuple[int, int, int]]
) -> None:
    """A job's history: a global batch, so many steps of it, then a kill that throws it back a few steps."""
    order = SampleOrder(Shuffled(num_samples), seed)
    saved = {0: BatchPlan(history[0][0], 1).stretches}
    step, counted = 0, {}
    for global_size, steps, lost in history:
        plan = BatchPlan(global_size, 1)
        plan.go_on(json.loads(json.dumps(saved[step])), step)  # as a checkpoint keeps it
        for _ in range(steps):
            counted[step] = taken(order, plan, step, 1)
            assert len(counted[step]) == global_size
            step += 1
            saved[step] = plan.stretches
        step = max(0, step - lost)
    samples = [sample for each in range(step) for sample in counted[each]]
    assert samples == [order.at(position) for position in range(len(samples))]


def test_other_samples_begin_with_the_first_of_them() -> None:
    plan = BatchPlan(8, 8)
    plan.begin_anew(5)
    assert plan.micro_batches(5, Place(0, 1)) == [range(8)]
    assert plan.micro_batches(6, Place(0, 1)) == [range(8, 16)]


def test_another_seed_and_another_epoch_give_another_order() -> None:
    one, other = SampleOrder(Shuffled(100), seed=1), SampleOrder(Shuffled(100), seed=2)
    first = [one.at(position) for position in range(100)]
    assert first != [other.at(position) for position in range(100)]
    assert first != [one.at(position) for position in range(100, 200)]


def test_a_window_reads_few_groups_at_once() -> None:
    order = np.asarray(list(Windowed([10] * 20, window=2).epoch(seed=1, epoch=0)))
    groups = [set((order[start : start + 20] // 10).tolist()) for start in range(0, 200, 20)]
    assert [len(each) for each in groups] == [2] * 10
    assert set.union(*groups) == set(range(20))
    assert order.tolist() != sorted(order.tolist())


def test_samples_grouped_by_length_leave_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 4000)

    def padding(order: Order) -> float:
        batches = lengths[list(order)].reshape(-1, 8)
        return 1 - lengths.sum() / (batches.max(axis=1) * 8).sum()

    grouped = LengthGrouped(4000, lengths.__getitem__, 8).epoch(seed=1, epoch=0)
    assert padding(grouped) < 0.03 < 0.3 < padding(Shuffled(4000).epoch(1, 0))
    firsts = lengths[list(grouped)][::8][:50]
    assert (np.diff(firsts) > 0).any(), "lengths only fall"
    assert (np.diff(firsts) < 0).any()


def test_a_batch_that_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="32"):
        BatchPlan(32, 8).micro_batches(0, Place(0, 3))


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 9))
def test_every_held_out_sample_belongs_to_exactly_one_rank(num_samples: int, size: int) -> None:
    shares = [sample for index in range(size) for sample in evaluation_share(num_samples, Place(index, size))]
    assert sorted(shares) == list(range(num_samples))


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 3))
def test_a_permutation_that_is_computed_has_every_element_once(length: int, seed: int, epoch: int) -> None:
    order = list(Permutation(length, [seed, epoch]))
    assert sorted(order) == list(range(length))
    assert order == list(Permutation(length, [seed, epoch]))


def test_a_permutation_that_is_computed_is_as_good_as_one_that_is_drawn() -> None:
    length, places = 40_000, np.arange(40_000)
    for order in (np.asarray(Permutation(length, [1, 0])), Shuffled(length).epoch(1, 0)):
        order = np.asarray(order)
        # Of a random order: no correlation with the places or among neighbours (standard error 0.005), about
        # one element at its own place, half of the neighbours rising.
        assert abs(np.corrcoef(places, order)[0, 1]) < 0.025
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.025
        assert (order == places).sum() < 10
        assert abs((np.diff(order) > 0).mean() - 0.5) < 0.02
        halves = [(order[start : start + 1000] < length / 2).mean() for start in range(0, length, 1000)]
        assert np.std(halves) == pytest.approx(0.5 / 1000**0.5, rel=0.4)
    other = np.asarray(Permutation(length, [1, 1]))
    assert (other == np.asarray(Permutation(length, [1, 0]))).mean() < 0.001


def test_an_epoch_of_half_a_billion_samples_takes_no_memory() -> None:
    tracemalloc.start()
    order = SampleOrder(Shuffled(500_000_000), seed=3)
    taken = [order.at(position) for position in (0, 1, 499_999_999, 500_000_000, 999_999_999)]
    assert len(set(taken)) > 3
    assert all(0 <= each < 500_000_000 for each in taken)
    windows = SampleOrder(Windowed([10_000] * 50_000, window=8), seed=3)
    assert 0 <= windows.at(499_999_999) < 500_000_000
    by_length = SampleOrder(LengthGrouped(500_000_000, lambda indices: indices % 1000, 8), seed=3)
    batch = [by_length.at(position) for position in range(250_000_000, 250_000_008)]
    assert len(set(batch)) == 8
    assert max(each % 1000 for each in batch) - min(each % 1000 for each in batch) < 100
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20e6, "it was 4 GB in every process"


def test_short_epochs_are_shuffled_as_they_were() -> None:
    assert list(Shuffled(100).epoch(1, 2)) == np.random.default_rng([1, 2]).permutation(100).tolist()
    assert len(Shuffled(WHOLE + 1).epoch(1, 2)) == WHOLE + 1
