"""Reading the batches of the next steps while this one computes, in order and from any step on."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from train_jobs.data.order import BatchPlan, Place, SampleOrder, evaluation_share
from train_jobs.data.source import Batch, Samples, StreamSamples, collated

_AHEAD_STEPS = 2
"""Steps that the loading processes read ahead."""


class BatchLoader:
    """The micro-batches of one rank, step by step.

    It keeps no position of its own that could be lost: what a step takes follows from its global batch and
    the rank's place. It reads ahead as long as batches follow one another at the same place, and begins anew
    where they do not: after a restart, or when the ranks of a job have changed.

    Args:
        seed: of the order of the samples and of their random changes.
        workers: processes that load ahead; with 0 this one loads, when a step asks.
        identity: what the samples and their order are known by; where a job goes on with others, they begin
            with their first.
    """

    def __init__(
        self, samples: Samples, plan: BatchPlan, seed: int, workers: int, identity: str = ""
    ) -> None:
        self.samples = samples
        self.identity = identity
        self.plan = plan
        self.seed = seed
        self.workers = workers
        self.order = SampleOrder(samples.arrangement(), seed)
        self.waited_s = 0.0
        """Seconds that steps have waited for their data, since this was last set to 0."""
        self._expected: tuple[int, Place] | None = None
        self._ahead: Generator[list[Batch]] | None = None

    @property
    def targets_per_sample(self) -> int:
        return self.samples.targets_per_sample

    def step(self, batch: int, place: Place) -> list[Batch]:
        """This rank's micro-batches of a global batch (from 0), on the CPU."""
        began = time.perf_counter()
        if self.workers == 0:
            read = _Positions(self.samples, self.order, self.seed)
            batches = [read[positions] for positions in self.plan.micro_batches(batch, place)]
        else:
            if self._ahead is None or self._expected != (batch, place):
                self.close()
                self._ahead = self._read_ahead(batch, place)
            batches = next(self._ahead)
            self._expected = (batch + 1, place)
        self.waited_s += time.perf_counter() - began
        return batches

    def close(self) -> None:
        """End the processes that load ahead; a later step starts new ones.

        Left to the garbage collector, their queues go before they do, and each is waited for 5 s.
        """
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def position(self) -> dict[str, Any]:
        """What tells where a batch begins; JSON can hold it."""
        return {"samples": self.identity, "stretches": self.plan.stretches}

    def seek(self, position: dict[str, Any] | None, batch: int) -> bool:
        """Go to the beginning of a global batch.

        Args:
            position: what `position` gave then; None of a job whose batches were of this size all along.

        Returns:
            whether these are other samples than then, and begin with their first.
        """
        other = position is not None and position["samples"] != self.identity
        if other:
            self.plan.begin_anew(batch)
        elif position is not None:
            self.plan.go_on(position["stretches"], batch)
        return other

    def _read_ahead(self, batch: int, place: Place) -> Generator[list[Batch]]:
        micro_batches = len(self.plan.micro_batches(batch, place))
        loader: DataLoader[Batch | Exception] = DataLoader(
            _PositionsApart(_Positions(self.samples, self.order, self.seed)),
            sampler=_endless(self.plan, batch, place),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=-(-_AHEAD_STEPS * micro_batches // self.workers),
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # it would draw from the one that the model draws from
        )
        batches = iter(loader)
        try:
            while True:
                yield [_unless_raised(next(batches)) for _ in range(micro_batches)]
        finally:
            del batches  # what was raised keeps this frame: see `close`


class _Positions(Dataset[Batch]):
    """Whole micro-batches by their positions, as a DataLoader asks for them."""

    def __init__(self, samples: Samples, order: SampleOrder, seed: int) -> None:
        self.samples = samples
        self.order = order
        self.seed = seed

    def __getitem__(self, positions: range) -> Batch:
        indices = [self.order.at(position) for position in positions]
        return self.samples.batch(indices, [(self.seed, position) for position in positions])


class _PositionsApart(Dataset[Batch | Exception]):
    """The same in a process that loads ahead, with what is raised there as it is.

    A DataLoader raises an exception whose message is a traceback; what a failure is goes by its own words.
    """

    def __init__(self, read: _Positions) -> None:
        self.read = read

    def __getitem__(self, positions: range) -> Batch | Exception:
        try:
            return self.read[positions]
        except Exception as error:
            error.add_note(f"raised in a process that loads ahead:\n{traceback.format_exc()}")
            if not _travels(error):
                raise  # as the DataLoader tells it
            return error


def _travels(error: Exception) -> bool:
    """Whether an exception arrives as what it is; one with arguments of its own may not."""
    try:
        return isinstance(pickle.loads(pickle.dumps(error)), type(error))
    except Exception:  # noqa: BLE001  (its class may do anything there)
        return False


def _unless_raised(batch: Batch | Exception) -> Batch:
    if isinstance(batch, Exception):
        raise batch
    return batch


def _endless(plan: BatchPlan, batch: int, place: Place) -> Iterator[range]:
    while True:
        yield from plan.micro_batches(batch, place)
        batch += 1


class StreamLoader:
    """The micro-batches of one rank out of a stream: every rank reads it, and takes what stands at its place.

    Its position is the stream's own (epoch and samples read), the same on all ranks between two steps.

    Args:
        identity: as of BatchLoader.
    """

    def __init__(self, stream: StreamSamples, plan: BatchPlan, identity: str = "") -> None:
        self.stream = stream
        self.identity = identity
        self.plan = plan
        self.targets_per_sample = 1
        self.waited_s = 0.0
        self._next = 0
        """The global batch at whose beginning the stream stands."""
        self._began: dict[str, int] | None = None
        """Where the batch before that begins, if it was taken here."""

    def step(self, batch: int, place: Place) -> list[Batch]:
        began = time.perf_counter()
        if batch == self._next - 1 and self._began is not None:
            self.stream.seek(**self._began)  # the step is done again
        else:
            self.stream.drop((batch - self._next) * self.plan.global_size)  # batches that are passed over
        self._next, self._began = batch + 1, self.stream.position()
        micro_batches = self.plan.micro_batches(batch, place)
        before = micro_batches[0].start - self.plan.begins(batch)
        self.stream.drop(before)
        batches = [self._together(self.stream.take(len(each))) for each in micro_batches]
        taken = sum(map(len, micro_batches))
        self.stream.drop(self.plan.global_size - before - taken)
        self.waited_s += time.perf_counter() - began
        return batches

    def _together(self, items: list[Any]) -> Batch:
        return collated(items, self.stream.dataset, self.stream.collate)

    def position(self) -> dict[str, Any]:
        return {"samples": self.identity, **self.stream.position()}

    def close(self) -> None:
        """Nothing to do: no process loads ahead."""

    def seek(self, position: dict[str, Any] | None, batch: int) -> bool:
        """Go to the beginning of a global batch, as BatchLoader.seek."""
        self._next, self._began = batch, None
        other = position is not None and position.get("samples", self.identity) != self.identity
        if other or position is None:
            self.stream.seek(0, 0)
            if position is None:
                self.stream.drop(batch * self.plan.global_size)  # saved by a job that read by index
        else:
            self.stream.seek(position["epoch"], position["offset"])
        return other


def make_loader(
    samples: Samples | StreamSamples, plan: BatchPlan, seed: int, workers: int, identity: str
) -> BatchLoader | StreamLoader:
    if isinstance(samples, StreamSamples):
        return StreamLoader(samples, plan, identity)
    return BatchLoader(samples, plan, seed, workers, identity)


def evaluation_batches(
    samples: Samples | StreamSamples, place: Place, micro: int
) -> Iterator[tuple[Batch, bool]]:
    """The held-out batches of one rank, and whether they count; every rank gets equally many.

    Sharded models gather parameters in every forward, so that a rank that has nothing left goes on with a
    batch that does not count.
    """
    if isinstance(samples, StreamSamples):
        yield from _from_stream(samples, place, micro)
        return
    mine = evaluation_share(len(samples), place)
    most = -(-len(samples) // place.size)
    for start in range(0, most, micro):
        indices = mine[start : start + micro]
        yield samples.batch(indices or [0], None), bool(indices)


def _from_stream(stream: StreamSamples, place: Place, micro: int) -> Iterator[tuple[Batch, bool]]:
    """Rounds of a micro-batch for every rank, to the end of the stream."""
    last: list[Any] = []

    def mine(round_: list[Any]) -> tuple[Batch, bool]:
        part = round_[place.index * micro : (place.index + 1) * micro]
        return collated(part or last[:1] or round_[:1], stream.dataset, stream.collate), bool(part)

    collected: list[Any] = []
    for item in stream.rest_of_epoch():
        collected.append(item)
        if len(collected) == micro * place.size:
            yield mine(collected)
            last, collected = collected, []
    if collected:
        yield mine(collected)
