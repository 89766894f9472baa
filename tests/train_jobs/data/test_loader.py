"""Loading ahead in processes and out of streams: the same batches as reading one by one."""

from __future__ import annotations

import errno
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from cluster.errors import RequestError
from train_jobs.data.loader import BatchLoader, StreamLoader, evaluation_batches
from train_jobs.data.order import BatchPlan, Place, SampleOrder, batch_of_step
from train_jobs.data.samples import PackedSamples
from train_jobs.data.source import DatasetSamples, StreamSamples, as_samples
from train_jobs.driver.failures import FailureClass, class_of
from train_jobs.errors import bases_of

PLAN = BatchPlan(global_size=8, micro=2)
SAMPLES = PackedSamples(np.arange(500, dtype=np.uint16), 4)


def first_tokens(batches: list[Any]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch["input_ids"]]


def test_processes_load_the_same_batches_whatever_the_place_and_the_step() -> None:
    plain = BatchLoader(SAMPLES, PLAN, seed=3, workers=0)
    ahead = BatchLoader(SAMPLES, PLAN, seed=3, workers=2)
    # Steps in a row, a change of the number of ranks, a step back, a leap, and a step done twice.
    history = [(0, 0, 1), (1, 0, 1), (2, 1, 2), (3, 1, 2), (1, 1, 2), (40, 3, 4), (40, 3, 4), (41, 3, 4)]
    for step, index, size in history:
        place = Place(index, size)
        assert first_tokens(ahead.step(step, place)) == first_tokens(plain.step(step, place))
    assert ahead.waited_s > 0
    ahead.close()


def test_processes_that_load_ahead_end_at_once_when_they_are_not_needed_any_more() -> None:
    loader = BatchLoader(SAMPLES, PLAN, seed=3, workers=2)
    others = set(psutil.Process().children())  # what tests before this one started
    loader.step(0, Place(0, 1))
    processes = set(psutil.Process().children()) - others
    assert len(processes) == 2
    began = time.monotonic()
    loader.close()
    assert not any(process.is_running() for process in processes)
    assert time.monotonic() - began < 4
    assert first_tokens(loader.step(1, Place(0, 1)))
    loader.close()


class OwnError(Exception):
    """An exception with arguments of its own, which does not travel."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class Raising(Dataset[dict[str, Any]]):
    """Samples that cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "failure_class"),
    [
        (OSError(errno.EIO, "Input/output error"), FailureClass.TRANSIENT),
        (RequestError("row 7 of a.parquet cannot be read"), FailureClass.REQUEST),
        (MemoryError("of this process"), FailureClass.MEMORY),
        (KeyError("text"), FailureClass.CODE),
    ],
)
def test_what_a_process_that_loads_ahead_raises_is_what_this_one_would(
    error: Exception, failure_class: FailureClass
) -> None:
    loader = BatchLoader(DatasetSamples(Raising(error)), PLAN, seed=3, workers=1)
    with pytest.raises(type(error)) as found:
        loader.step(0, Place(0, 1))
    assert not multiprocessing.active_children(), "whoever reports this waits for them"
    assert str(found.value) == str(error)
    assert class_of(type(error).__name__, str(found.value), bases_of(found.value)) is failure_class
    assert "raise self.error" in found.value.__notes__[0], "the traceback says where"


def test_an_exception_that_does_not_travel_is_told_by_its_traceback() -> None:
    loader = BatchLoader(DatasetSamples(Raising(OwnError("a hole", "a file"))), PLAN, seed=3, workers=1)
    with pytest.raises(RuntimeError, match="a hole in a file"):
        loader.step(0, Place(0, 1))
    loader.close()


class Noisy(Dataset[dict[str, Any]]):
    """Samples that come out different each time."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = [torch.rand(1).item(), random.random(), float(np.random.rand())]
        return {"index": index, "noise": np.asarray(noise)}


def test_random_changes_follow_from_the_position_alone() -> None:
    loaders = [BatchLoader(DatasetSamples(Noisy()), PLAN, seed=3, workers=workers) for workers in (0, 2)]
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, other = (loader.step(4, Place(0, 1)) for loader in loaders)
    assert torch.equal(torch.rand(1), expected), "the process's own generator was moved"
    loaders[1].close()
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine["index"], theirs["index"])
        assert torch.equal(mine["noise"], theirs["noise"])
    rows = torch.cat([batch["noise"] for batch in one])
    assert len(rows.unique()) == rows.numel()
    halves = [loaders[0].step(4, Place(index, 2)) for index in (0, 1)]
    assert torch.equal(torch.cat([batch["noise"] for half in halves for batch in half]), rows)


class Stream(IterableDataset[dict[str, int]]):
    """A stream of unknown length whose samples say where they stood."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        for item in range(self.length):
            yield {"item": self.epoch * self.length + item}


def items(batches: list[Any]) -> list[int]:
    return [int(item) for batch in batches for item in batch["item"]]


@settings(max_examples=40)
@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 4)), min_size=1, max_size=6),
)
def test_a_stream_is_read_once_whatever_the_number_of_ranks(
    length: int, history: list[tuple[int, int]]
) -> None:
    step, position, found = 0, {"epoch": 0, "offset": 0}, []
    for size, steps in history:
        ranks = [StreamLoader(StreamSamples(Stream(length)), PLAN) for _ in range(size)]
        for rank in ranks:  # a restart, at another number of ranks
            rank.seek(position, step)
        for _ in range(steps):
            found += [
                item
                for index, rank in enumerate(ranks)
                for item in items(rank.step(step, Place(index, size)))
            ]
            step += 1
        positions = [rank.position() for rank in ranks]
        assert all(each == positions[0] for each in positions)
        position = positions[0]  # type: ignore[assignment]
    assert found == list(range(len(found)))


class Skipping(Stream):
    """A stream that can go on elsewhere, and counts what it was read."""

    read = 0

    def skip(self, number: int) -> Iterator[dict[str, int]]:
        return (self.counted(item) for item in range(number, self.length))

    def counted(self, item: int) -> dict[str, int]:
        self.read += 1
        return {"item": self.epoch * self.length + item}


def test_a_stream_that_can_skip_is_not_read_up_to_its_place() -> None:
    stream = Skipping(30)
    loader = StreamLoader(StreamSamples(stream), PLAN)
    loader.seek({"epoch": 1, "offset": 20}, 6)
    assert items(loader.step(6, Place(0, 1))) == list(range(50, 58))
    assert stream.read == 8
    assert items(loader.step(7, Place(0, 1))) == list(range(58, 66)), "the next epoch follows"


def test_a_step_of_a_stream_is_done_again_with_the_same_samples() -> None:
    loader = StreamLoader(StreamSamples(Stream(30)), PLAN)
    assert items(loader.step(0, Place(0, 1))) == list(range(8))
    again = items(loader.step(0, Place(0, 2))) + items(loader.step(0, Place(1, 2)))
    assert again == list(range(8))
    assert items(loader.step(1, Place(0, 1))) == list(range(8, 16))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.sets(st.integers(0, 9)), st.integers(0, 5), st.integers(1, 6))
def test_a_stream_is_read_past_batches_that_are_passed_over_from_any_place(
    length: int, passed_over: set[int], saved: int, further: int
) -> None:
    """The batches of some steps; then back to where it was saved, on the same loader, with more left out."""
    loader, order = StreamLoader(StreamSamples(Stream(length)), PLAN), sorted(passed_over)
    taken = []
    for step in range(saved + further):
        if step == saved:
            position = loader.position()
        taken += items(loader.step(batch_of_step(step, order), Place(0, 1)))
    left = [batch for batch in range(40) if batch not in passed_over]
    assert taken == [8 * batch + place for batch in left[: saved + further] for place in range(8)]
    used = left[saved - 1] + 1 if saved else 0
    del left[saved]  # the batch that was bad
    loader.seek(position, used)
    again = items(loader.step(left[saved], Place(0, 1)))
    assert again == [8 * left[saved] + place for place in range(8)]


def test_a_stream_goes_back_to_a_checkpoint_of_a_job_that_read_by_index() -> None:
    loader = StreamLoader(StreamSamples(Stream(30)), PLAN)
    for batch in range(3):
        loader.step(batch, Place(0, 1))
    loader.seek(None, 2)
    assert items(loader.step(2, Place(0, 1))) == list(range(16, 24))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 30])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_takes_every_sample_once_and_every_rank_runs_equally_often(length: int, size: int) -> None:
    indexed = PackedSamples(np.arange(length * 4 + 1, dtype=np.uint16), 4)
    for source, first in ((indexed, first_tokens), (StreamSamples(Stream(length)), items)):
        ranks = [list(evaluation_batches(source, Place(index, size), 3)) for index in range(size)]
        assert len({len(rank) for rank in ranks}) == 1
        found = [value for rank in ranks for batch, counts in rank if counts for value in first([batch])]
        step = 4 if source is indexed else 1
        assert sorted(found) == [step * index for index in range(length)]


def test_data_that_cannot_be_read_is_refused() -> None:
    class Endless(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return index

    with pytest.raises(RequestError, match="Endless has no length"):
        as_samples(Endless())
    Endless.__len__ = lambda self: 3  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="Endless gives int; a sample is a dict"):
        as_samples(Endless()).batch([0], None)  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="Stream gives no sample at all"):
        StreamLoader(StreamSamples(Stream(0)), PLAN).step(0, Place(0, 1))


def test_other_samples_than_those_of_the_checkpoint_begin_with_their_first() -> None:
    place, order = Place(0, 1), SampleOrder(SAMPLES.arrangement(), 3)

    def loader(identity: str, global_size: int = 8) -> BatchLoader:
        return BatchLoader(SAMPLES, BatchPlan(global_size, 2), seed=3, workers=0, identity=identity)

    before = loader("one")
    position = json.loads(json.dumps(before.position()))
    expected = [int(SAMPLES.sample(order.at(each))[0]) for each in range(8)]
    for identity, other in (("one", False), ("two", True)):
        after = loader(identity)
        assert after.seek(position, 3) is other
        assert (first_tokens(after.step(3, place)) == expected) is other
        again = loader(identity)
        assert again.seek(json.loads(json.dumps(after.position())), 4) is False, "it is said once"
        assert first_tokens(again.step(4, place)) == first_tokens(after.step(4, place))
    old = loader("one")
    assert old.seek(None, 3) is False, "an older version knew nothing of other samples"
    assert first_tokens(old.step(3, place)) == first_tokens(before.step(3, place))


def test_another_stream_begins_at_its_beginning() -> None:
    def loader(identity: str) -> StreamLoader:
        return StreamLoader(StreamSamples(Stream(30)), BatchPlan(4, 2), identity)

    before = loader("one")
    for batch in range(3):
        before.step(batch, Place(0, 1))
    position = json.loads(json.dumps(before.position()))
    same, other = loader("one"), loader("two")
    assert (same.seek(position, 3), other.seek(position, 3)) == (False, True)
    assert (same.stream.offset, other.stream.offset) == (12, 0)
    assert loader("one").seek({"epoch": 0, "offset": 12}, 3) is False, "an older version saved no more"
