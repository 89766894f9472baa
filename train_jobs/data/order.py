"""Which samples a step takes, and which of them a rank takes: pure functions, the same for any world size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from train_jobs.data.arrangements import Arrangement


@dataclass(frozen=True)
class Place:
    """A rank's place in a step.

    Attributes:
        index: among the data-parallel ranks that take part.
        size: their number.
        group: how many of them, side by side, make one replica group: they take equally many micro-batches,
            since they meet in every one of them. Without it, all of them do.
    """

    index: int
    size: int
    group: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size or self.size % self.in_group:
            raise ValueError(f"place {self.index} of {self.size} in groups of {self.in_group}")

    @property
    def in_group(self) -> int:
        return self.group or self.size


class Stretch(NamedTuple):
    """Global batches of one size: the first of them, the global position where it begins, and their size."""

    batch: int
    position: int
    size: int


class BatchPlan:
    """How the positions of a job are cut into global batches, and these for the ranks.

    Global batch b (from 0) holds the global positions [b·global_size, (b+1)·global_size), cut into
    micro-batches; a rank takes a run of whole micro-batches. Step b takes batch b, unless batches were passed
    over before (see `batch_of_step`). What stands at a position never depends on who reads it, so that
    a change of ranks neither repeats nor skips a sample. Where the micro-batches cannot be shared evenly
    among replica groups, the first groups take one more for each of their ranks.

    Batches count on where a job goes on with another global size: the next one begins where the last one of
    the old size ended, so that this repeats and skips no sample either.

    Args:
        global_size: samples of a batch from now on.
        micro: samples of a micro-batch.
    """

    def __init__(self, global_size: int, micro: int) -> None:
        self.global_size = global_size
        self.micro = micro
        self.stretches: tuple[Stretch, ...] = (Stretch(0, 0, global_size),)

    def begins(self, batch: int) -> int:
        """The global position at which a batch begins."""
        stretch = next(each for each in reversed(self.stretches) if each.batch <= batch)
        return stretch.position + (batch - stretch.batch) * stretch.size

    def go_on(self, stretches: Iterable[Sequence[int]], batch: int) -> None:
        """Go on from this batch (from 0) of a job whose batches before were of these stretches."""
        self.stretches = tuple(Stretch(*each) for each in stretches)
        if self.stretches[-1].size != self.global_size:
            before = tuple(each for each in self.stretches if each.batch < batch)
            self.stretches = (*before, Stretch(batch, self.begins(batch), self.global_size))

    def begin_anew(self, batch: int) -> None:
        """Take the first position again with this batch: the samples are other ones from here on."""
        self.stretches = (Stretch(0, 0, self.global_size), Stretch(batch, 0, self.global_size))

    def micro_batches(self, batch: int, place: Place) -> list[range]:
        """One rank's global positions of a global batch, by micro-batch; all of a group have equally many.

        Raises:
            ValueError: the global batch cannot be cut for so many ranks.
        """
        groups = place.size // place.in_group
        rounds, rest = divmod(self.global_size, self.micro * place.in_group)
        if rest or rounds < groups:
            raise ValueError(
                f"a global batch of {self.global_size} cannot be cut into micro-batches of {self.micro} "
                f"for {place.size} ranks" + (f" in groups of {place.in_group}" if groups > 1 else "")
            )
        group, index = divmod(place.index, place.in_group)
        each, longer = divmod(rounds, groups)
        mine = each + (group < longer)
        before = (group * each + min(group, longer)) * place.in_group + index * mine
        first = self.begins(batch) + before * self.micro
        return [
            range(start, start + self.micro) for start in range(first, first + mine * self.micro, self.micro)
        ]


def batch_of_step(step: int, passed_over: Sequence[int]) -> int:
    """The global batch that a step takes, where some are never taken; all count from 0.

    Args:
        passed_over: the batches that are not, in ascending order.
    """
    batch = step
    for each in passed_over:
        batch += each <= batch
    return batch


class SampleOrder:
    """The samples at all global positions, which count from 0 over all epochs.

    Nothing but (seed, epoch, position) decides which sample stands at a position.
    """

    def __init__(self, arrangement: Arrangement, seed: int) -> None:
        self.num_samples = arrangement.num_samples
        self._epoch = lru_cache(maxsize=2)(lambda epoch: arrangement.epoch(seed, epoch))

    def at(self, position: int) -> int:
        """The index of the sample at a position."""
        epoch, offset = divmod(position, self.num_samples)
        return int(self._epoch(epoch)[offset])


def evaluation_share(num_samples: int, place: Place) -> range:
    """The held-out samples of one rank: each sample belongs to exactly one rank, none is padded in."""
    return range(place.index, num_samples, place.size)
