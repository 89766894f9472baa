"""How the samples of an epoch are shuffled: permutations from (seed, epoch) alone, pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from train_jobs.data.permutation import Permutation

WHOLE = 2**20
"""An epoch of at most so many samples is put in order at once; of a longer one each place is computed when it
is asked for: every process would hold eight bytes a sample otherwise."""


class Order(Protocol):
    """The samples of an epoch, by their places."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Any: ...


class Arrangement(Protocol):
    """A rule that puts the samples of an epoch in order."""

    @property
    def num_samples(self) -> int: ...

    def epoch(self, seed: int, epoch: int) -> Order:
        """The order of one epoch: every sample's index once."""


def _generator(*key: int) -> np.random.Generator:
    return np.random.default_rng(list(key))


class Shuffled:
    """Any sample may follow any other: for data that is read at random as fast as in order."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def epoch(self, seed: int, epoch: int) -> Order:
        if self._num_samples > WHOLE:
            return Permutation(self._num_samples, [seed, epoch])
        return _generator(seed, epoch).permutation(self._num_samples)


class Windowed:
    """Shuffled within windows of a few groups, which are shuffled themselves.

    For data that is read by groups (the row groups of Parquet): whoever keeps a window's groups in memory
    reads each group once an epoch.

    Args:
        group_sizes: samples of each group; samples count through the groups.
        window: groups in a window.
    """

    def __init__(self, group_sizes: Sequence[int], window: int) -> None:
        self.ends = np.cumsum(np.asarray(group_sizes, dtype=np.int64))
        self.window = window

    @property
    def num_samples(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def epoch(self, seed: int, epoch: int) -> Order:
        return _Windows(self.ends, self.window, seed, epoch)


class _Windows:
    """An epoch of `Windowed`; only the windows that are read are put in order."""

    def __init__(self, ends: np.ndarray, window: int, seed: int, epoch: int) -> None:
        self._ends = ends
        self._starts = np.concatenate([[0], ends[:-1]])
        self._window = window
        self._key = seed, epoch
        self._groups = _generator(seed, epoch).permutation(len(ends))
        sizes = (self._ends - self._starts)[self._groups]
        firsts = np.arange(0, len(self._groups), window)
        self._window_ends = np.cumsum(np.add.reduceat(sizes, firsts)) if len(sizes) else sizes
        self._inside = lru_cache(maxsize=2)(self._order)

    def __len__(self) -> int:
        return int(self._window_ends[-1]) if len(self._window_ends) else 0

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < len(self):
            raise IndexError(f"{place} of {len(self)}")
        window = int(np.searchsorted(self._window_ends, place, side="right"))
        order = self._inside(window)
        return int(order[place - int(self._window_ends[window]) + len(order)])

    def _order(self, window: int) -> np.ndarray:
        groups = self._groups[window * self._window : (window + 1) * self._window]
        inside = np.concatenate([np.arange(self._starts[group], self._ends[group]) for group in groups])
        return _generator(*self._key, window).permutation(inside)


class LengthGrouped:
    """Shuffled so that neighbours are of similar length, which leaves little padding in a batch.

    As in transformers' `group_by_length`: the shuffled samples are cut into large windows, each is sorted by
    length, and whole batches of it are shuffled again, so that lengths do not rise through a window. Batches
    stay in their window: only those that are read need be put in order.

    Args:
        lengths_of: the lengths of some samples, by their indices.
        batch: samples that are padded together.
    """

    WINDOW_BATCHES = 50

    def __init__(self, num_samples: int, lengths_of: Callable[[np.ndarray], np.ndarray], batch: int) -> None:
        self._shuffled = Shuffled(num_samples)
        self._lengths_of = lengths_of
        self._batch = batch

    @property
    def num_samples(self) -> int:
        return self._shuffled.num_samples

    def epoch(self, seed: int, epoch: int) -> Order:
        return _SortedWindows(self._shuffled, self._lengths_of, self._batch, seed, epoch)


class _SortedWindows:
    """An epoch of `LengthGrouped`."""

    def __init__(
        self,
        shuffled: Shuffled,
        lengths_of: Callable[[np.ndarray], np.ndarray],
        batch: int,
        seed: int,
        epoch: int,
    ) -> None:
        self._shuffled = shuffled.epoch(seed, epoch)
        self._lengths_of = lengths_of
        self._batch = batch
        self._window = batch * LengthGrouped.WINDOW_BATCHES
        self._key = seed, epoch
        self._inside = lru_cache(maxsize=2)(self._order)

    def __len__(self) -> int:
        return len(self._shuffled)

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < len(self):
            raise IndexError(f"{place} of {len(self)}")
        window, offset = divmod(place, self._window)
        return int(self._inside(window)[offset])

    def _order(self, window: int) -> np.ndarray:
        places = range(window * self._window, min((window + 1) * self._window, len(self)))
        inside = np.asarray([self._shuffled[place] for place in places], dtype=np.int64)
        inside = inside[np.argsort(-self._lengths_of(inside), kind="stable")]
        # A batch that is not whole comes last: before the others it would shift them all.
        whole = len(inside) // self._batch * self._batch
        batches = _generator(*self._key, window).permutation(inside[:whole].reshape(-1, self._batch))
        return np.concatenate([batches.ravel(), inside[whole:]])
