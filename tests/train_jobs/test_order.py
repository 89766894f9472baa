"""The order of samples: from (seed, epoch, position) alone, whatever the number of workers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_jobs.data.order import Place, SampleOrder, evaluation_share, sample_at


def taken(order: SampleOrder, step: int, size: int) -> list[int]:
    """What all ranks of a step take, in rank order."""
    places = [Place(index, size) for index in range(size)]
    return [sample for place in places for batch in order.micro_batches(step, place) for sample in batch]


def test_one_two_and_four_workers_read_the_same_samples_in_the_same_order() -> None:
    order = SampleOrder(num_samples=1000, global_size=32, micro=4, seed=7)
    for step in range(70):  # more than two epochs
        alone = taken(order, step, 1)
        assert taken(order, step, 2) == alone
        assert taken(order, step, 4) == alone


@given(
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(0, 2**40),
    st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=20),
)
def test_a_change_of_workers_between_steps_neither_repeats_nor_skips_a_sample(
    epoch_steps: int, micro: int, seed: int, sizes: list[int]
) -> None:
    global_size = micro * 12
    num_samples = epoch_steps * global_size
    order = SampleOrder(num_samples, global_size, micro, seed)
    counts: Counter[int] = Counter()
    for step in range(epoch_steps):
        counts.update(taken(order, step, sizes[step % len(sizes)]))
    assert counts == Counter(range(num_samples))


def test_another_seed_and_another_epoch_give_another_order() -> None:
    first = [sample_at(position, 100, seed=1) for position in range(100)]
    assert first != [sample_at(position, 100, seed=2) for position in range(100)]
    assert first != [sample_at(position, 100, seed=1) for position in range(100, 200)]
    assert sorted(first) == list(range(100))


def test_an_epoch_that_ends_inside_a_step_goes_on_with_the_next() -> None:
    order = SampleOrder(num_samples=10, global_size=4, micro=1, seed=3)
    read = [sample for step in range(5) for sample in order.step(step)]
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))


def test_a_batch_that_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="32"):
        SampleOrder(100, 32, 8, 0).micro_batches(0, Place(0, 3))


@given(st.integers(0, 200), st.integers(1, 9))
def test_every_held_out_sample_belongs_to_exactly_one_rank(num_samples: int, size: int) -> None:
    shares = [sample for index in range(size) for sample in evaluation_share(num_samples, Place(index, size))]
    assert sorted(shares) == list(range(num_samples))
