"""Which samples a step takes, and which of them a rank takes: pure functions, the same for any world size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=2)
def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of one epoch, from (seed, epoch) alone."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def sample_at(position: int, num_samples: int, seed: int) -> int:
    """The sample at a global position; positions count from 0 over all epochs."""
    epoch, offset = divmod(position, num_samples)
    return int(epoch_order(num_samples, seed, epoch)[offset])


@dataclass(frozen=True)
class Place:
    """A rank's place in a step: its index among the data-parallel ranks that take part, and their number."""

    index: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ValueError(f"place {self.index} of {self.size}")


@dataclass(frozen=True)
class SampleOrder:
    """The order of a job's samples.

    Step s (from 0) takes the global positions [s·global_size, (s+1)·global_size), cut into micro-batches;
    a rank takes a run of whole micro-batches. Nothing but (seed, epoch, global position) decides which
    sample stands at a position, so a change of workers neither repeats nor skips one.
    """

    num_samples: int
    global_size: int
    micro: int
    seed: int

    def step(self, step: int) -> list[int]:
        """All samples of a step, in order."""
        first = step * self.global_size
        return [sample_at(p, self.num_samples, self.seed) for p in range(first, first + self.global_size)]

    def micro_batches(self, step: int, place: Place) -> list[list[int]]:
        """The micro-batches of one rank in one step; every rank of a step gets equally many.

        Raises:
            ValueError: the global batch cannot be cut evenly for so many ranks.
        """
        if self.global_size % (self.micro * place.size):
            raise ValueError(
                f"a global batch of {self.global_size} cannot be cut into micro-batches of {self.micro} "
                f"for {place.size} ranks"
            )
        samples = self.step(step)
        share = self.global_size // place.size
        mine = samples[place.index * share : (place.index + 1) * share]
        return [mine[start : start + self.micro] for start in range(0, share, self.micro)]


def evaluation_share(num_samples: int, place: Place) -> range:
    """The held-out samples of one rank: each sample belongs to exactly one rank, none is padded in."""
    return range(place.index, num_samples, place.size)
