"""What the loader reads from: samples by index, or a stream of samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from cluster.errors import RequestError
from train_jobs.data.arrangements import Arrangement, Shuffled

Batch = Mapping[str, torch.Tensor]
"""The tensors of some samples by name; the first dim of each counts the samples."""


Collate = Callable[[list[Any]], Batch]
"""Puts samples together."""


@runtime_checkable
class Samples(Protocol):
    """Samples by index; what a built-in task reads from."""

    @property
    def targets_per_sample(self) -> int:
        """How much counts in a sample at most: its tokens, or 1."""

    def __len__(self) -> int: ...

    def arrangement(self) -> Arrangement:
        """How an epoch is shuffled."""

    def batch(self, indices: Sequence[int], keys: Sequence[Sequence[int]] | None) -> Batch:
        """Some samples, in this order.

        Args:
            keys: for each sample what its random changes follow from, (seed, position); None changes nothing.
        """


class DatasetSamples:
    """A torch Dataset (with a length) of a user's task as Samples.

    Random changes in `__getitem__` follow from the seed and the sample's position in the run, whoever reads
    it: torch's, numpy's and Python's generators are set before each call.
    """

    targets_per_sample = 1

    def __init__(self, dataset: Dataset[Any], collate: Collate | None = None) -> None:
        if not hasattr(dataset, "__len__"):
            raise RequestError(
                f"{type(dataset).__name__} has no length; data of unknown length is an IterableDataset"
            )
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def arrangement(self) -> Arrangement:
        return Shuffled(len(self))

    def batch(self, indices: Sequence[int], keys: Sequence[Sequence[int]] | None) -> Batch:
        items = []
        for place, index in enumerate(indices):
            if keys is None:
                items.append(self.dataset[index])
            else:
                with seeded(keys[place]):
                    items.append(self.dataset[index])
        return collated(items, self.dataset, self.collate)


def collated(items: list[Any], source: object, collate: Collate | None = None) -> Batch:
    """Samples as one batch.

    Args:
        items: each a mapping from name to tensor, array or number, unless the task puts them together itself.

    Raises:
        RequestError: they cannot be put together; the message says which name is in the way.
    """
    whose = type(source).__name__
    if collate is not None:
        batch = collate(items)
        if not isinstance(batch, Mapping) or not all(
            isinstance(each, torch.Tensor) for each in batch.values()
        ):
            raise RequestError("the task's collate should give a dict of tensors")
        return batch
    if not all(isinstance(item, Mapping) for item in items):
        raise RequestError(
            f"{whose} gives {type(items[0]).__name__}; a sample is a dict of tensors, arrays or numbers"
        )
    batch = {}
    for name in items[0]:
        values = [item.get(name) for item in items]
        shapes = sorted({tuple(getattr(value, "shape", ())) for value in values})
        if len(shapes) > 1:
            raise RequestError(
                f"{whose}: `{name}` has other shapes from sample to sample ({shapes[0]}, {shapes[1]}); make"
                " them alike, or give the task a method collate(samples) that puts them together"
            )
        try:
            together = default_collate(values)
        except (TypeError, RuntimeError) as error:
            together = error
        if not isinstance(together, torch.Tensor):
            kinds = sorted({type(value).__name__ for value in values})
            raise RequestError(
                f"{whose}: `{name}` is {' or '.join(kinds)}; a sample is a dict of tensors, arrays or numbers"
                " (a method collate(samples) of the task may make some of it)"
            )
        batch[name] = together
    return batch


@contextmanager
def seeded(key: Sequence[int]) -> Iterator[None]:
    """All of a process's generators set from a key, and put back afterwards."""
    words = np.random.SeedSequence(list(key)).generate_state(2)
    python, old = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(words[0]))
        random.seed(int(words[0]))
        np.random.seed(words[1])
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(old)


class StreamSamples:
    """A torch IterableDataset of a user's task: samples in the order of the stream, of unknown number.

    A stream that has a method `set_epoch(epoch)` is told when it begins anew, as transformers and datasets
    have it; one with `skip(n)` goes on elsewhere without being read up to there.
    """

    def __init__(self, dataset: IterableDataset[Any], collate: Collate | None = None) -> None:
        self.dataset = dataset
        self.collate = collate
        self.epoch = 0
        self.offset = 0
        """Samples of this epoch that were read or skipped."""
        self._items: Iterator[Any] | None = None

    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "offset": self.offset}

    def seek(self, epoch: int, offset: int) -> None:
        """Go to a place that `position` gave."""
        self.epoch, self.offset, self._items = epoch, 0, None
        if offset and hasattr(self.dataset, "skip"):
            self._set_epoch()
            self._items = iter(self.dataset.skip(offset))
            self.offset = offset
        elif offset:
            self._pass_over(offset)

    def take(self, number: int) -> list[Any]:
        """The next samples; where an epoch ends, the next begins."""
        items: list[Any] = []
        while len(items) < number:
            for item in self._stream():
                items.append(item)
                self.offset += 1
                if len(items) == number:
                    return items
            self._begin_next()
        return items

    def drop(self, number: int) -> None:
        """Pass over samples that other ranks take."""
        while number > 0:
            number -= self._pass_over(number)
            if number > 0:
                self._begin_next()

    def is_empty(self) -> bool:
        """Whether it has no sample; looked at from its beginning, where it stands again afterwards."""
        self.seek(0, 0)
        empty = next(self._stream(), None) is None
        self.seek(0, 0)
        return empty

    def rest_of_epoch(self) -> Iterator[Any]:
        """Every sample to the end of the stream, once; for evaluation."""
        yield from self._stream()
        self._items = None

    def _pass_over(self, number: int) -> int:
        """Read samples of this epoch and forget them; returns how many there were."""
        done = 0
        for _ in self._stream():
            done += 1
            self.offset += 1
            if done == number:
                break
        return done

    def _stream(self) -> Iterator[Any]:
        if self._items is None:
            self._set_epoch()
            self._items = iter(self.dataset)
        return self._items

    def _set_epoch(self) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)

    def _begin_next(self) -> None:
        if self.offset == 0:
            raise RequestError(f"{type(self.dataset).__name__} gives no sample at all")
        self.epoch, self.offset, self._items = self.epoch + 1, 0, None


def has_samples(data: Samples | StreamSamples) -> bool:
    return not data.is_empty() if isinstance(data, StreamSamples) else len(data) > 0


def as_samples(data: Samples | Dataset[Any], collate: Collate | None = None) -> Samples | StreamSamples:
    """What a task gave, as the loader reads it.

    Args:
        collate: makes a batch of samples, where the task does so itself.
    """
    if isinstance(data, IterableDataset):
        return StreamSamples(data, collate)
    if isinstance(data, Samples):
        return data
    return DatasetSamples(data, collate)
