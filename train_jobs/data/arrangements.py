"""How the samples of an epoch are shuffled: permutations from (seed, epoch) alone, pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Arrangement(Protocol):
    """A rule that puts the samples of an epoch in order."""

    @property
    def num_samples(self) -> int: ...

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        """The order of one epoch: every sample's index once, int64."""


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng([seed, epoch])


class Shuffled:
    """Any sample may follow any other: for data that is read at random as fast as in order."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
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

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        generator = _generator(seed, epoch)
        starts = np.concatenate([[0], self.ends[:-1]])
        groups = generator.permutation(len(self.ends))
        parts = []
        for first in range(0, len(groups), self.window):
            inside = [np.arange(starts[g], self.ends[g]) for g in groups[first : first + self.window]]
            parts.append(generator.permutation(np.concatenate(inside)))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


class LengthGrouped:
    """Shuffled so that neighbours are of similar length, which leaves little padding in a batch.

    As in transformers' `group_by_length`: the shuffled samples are cut into large windows, each is sorted by
    length, and whole batches of it are shuffled again, so that lengths do not rise through a window.

    Args:
        lengths: of every sample.
        batch: samples that are padded together.
    """

    WINDOW_BATCHES = 50

    def __init__(self, lengths: np.ndarray, batch: int) -> None:
        self.lengths = lengths
        self.batch = batch

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        generator = _generator(seed, epoch)
        order = generator.permutation(self.num_samples)
        window = self.batch * self.WINDOW_BATCHES
        whole: list[np.ndarray] = []
        rest: list[np.ndarray] = []
        for first in range(0, len(order), window):
            inside = order[first : first + window]
            inside = inside[np.argsort(-self.lengths[inside], kind="stable")]
            for start in range(0, len(inside), self.batch):
                part = inside[start : start + self.batch]
                (whole if len(part) == self.batch else rest).append(part)
        # A batch that is not whole comes last: before the others it would shift them all.
        parts = [whole[index] for index in generator.permutation(len(whole))] + rest
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
