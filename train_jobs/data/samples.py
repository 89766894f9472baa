"""Samples of a token stream: packed windows, or one document each, padded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from train_jobs.data.arrangements import Arrangement, LengthGrouped, Shuffled
from train_jobs.data.source import Batch

IGNORED = -100
"""Target that no loss counts, as in torch and transformers."""


class PackedSamples:
    """Windows of `length` targets over a flat token stream; neighbours share one token.

    Sample i holds tokens [i·length, i·length + length]: its inputs are all but the last, its targets all but
    the first, so every token of the stream but the very first is a target exactly once.
    """

    def __init__(self, tokens: np.ndarray, length: int, *, keep_tail: bool = False) -> None:
        self.tokens = tokens
        self.length = length
        targets = max(len(tokens) - 1, 0)
        self.full = targets // length
        self.tail = targets % length if keep_tail else 0

    def __len__(self) -> int:
        return self.full + (self.tail > 0)

    @property
    def num_targets(self) -> int:
        return self.full * self.length + self.tail

    @property
    def targets_per_sample(self) -> int:
        return self.length

    def arrangement(self) -> Arrangement:
        return Shuffled(len(self))

    def sample(self, index: int) -> np.ndarray:
        """The tokens of one sample, [length + 1] (shorter for a kept tail)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.length
        return self.tokens[start : start + self.length + 1]

    def batch(self, indices: Sequence[int], keys: Sequence[Sequence[int]] | None = None) -> Batch:
        """`input_ids` and `targets` of several samples, each [len(indices), length].

        A short tail is filled up: its inputs with token 0, its targets with IGNORED.
        """
        return padded([self.sample(index) for index in indices], self.length)


class DocumentSamples:
    """One document a sample, cut into pieces where it is longer than a sample; short ones are padded.

    Neighbouring pieces share one token, so that every token of a document but its first is a target once.

    Args:
        tokens: the stream of all documents.
        starts: where each document begins in it.
        length: targets of a sample at most.
        multiple: batches are padded to a multiple of this.
        group_by_length: put samples of similar length together in `micro` samples.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        length: int,
        *,
        micro: int,
        multiple: int = 1,
        group_by_length: bool = False,
    ) -> None:
        self.tokens = tokens
        self.length = length
        self.micro = micro
        self.multiple = multiple
        self.group_by_length = group_by_length
        self.pieces = Pieces(starts, len(tokens), length)

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def targets_per_sample(self) -> int:
        return self.length

    def arrangement(self) -> Arrangement:
        if self.group_by_length:
            return LengthGrouped(len(self), self.pieces.sizes, self.micro)
        return Shuffled(len(self))

    def batch(self, indices: Sequence[int], keys: Sequence[Sequence[int]] | None = None) -> Batch:
        """`input_ids` and `targets`, each [len(indices), longest of them]; padding is token 0 and IGNORED."""
        samples = [self.tokens[slice(*self.pieces[index])] for index in indices]
        longest = max(len(sample) - 1 for sample in samples)
        return padded(samples, -(-longest // self.multiple) * self.multiple)


class Pieces:
    """The pieces that documents are cut into, by index: where each begins and ends in the token stream.

    Where documents begin stays in its file; of the pieces is kept how many there are up to each end of a
    block of documents, and which one is asked for is found within its block.

    Args:
        starts: where each document begins.
        end: where the last one ends.
        length: targets of a piece at most.
    """

    BLOCK = 2**10
    _READ = 2**6
    """Blocks that are counted at once."""

    def __init__(self, starts: np.ndarray, end: int, length: int) -> None:
        self._starts = starts
        self._end = end
        self._length = length
        counts = [np.zeros(0, dtype=np.int64)]
        step = self.BLOCK * self._READ
        for first in range(0, len(starts), step):
            pieces = self._cut(first, first + step)[2]
            counts.append(np.add.reduceat(pieces, np.arange(0, len(pieces), self.BLOCK)))
        self._block_ends = np.cumsum(np.concatenate(counts))

    def __len__(self) -> int:
        return int(self._block_ends[-1]) if len(self._block_ends) else 0

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        block = int(np.searchsorted(self._block_ends, index, side="right"))
        starts, ends, pieces = self._cut(block * self.BLOCK, (block + 1) * self.BLOCK)
        up_to = np.cumsum(pieces)
        inside = index - int(self._block_ends[block]) + int(up_to[-1])
        document = int(np.searchsorted(up_to, inside, side="right"))
        number = inside - int(up_to[document] - pieces[document])
        start = int(starts[document]) + number * self._length
        return start, min(start + self._length + 1, int(ends[document]))

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """How many tokens some pieces have."""
        return np.asarray([end - start for start, end in map(self.__getitem__, indices)], dtype=np.int64)

    def _cut(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of some documents where each begins and ends, and how many pieces it is cut into."""
        starts = np.asarray(self._starts[first : last + 1]).astype(np.int64)
        if last >= len(self._starts):
            starts = np.append(starts, self._end)
        targets = np.diff(starts) - 1
        return starts[:-1], starts[1:], np.maximum(0, -(-targets // self._length))


def padded(samples: Sequence[np.ndarray], length: int) -> Batch:
    """Samples of up to `length` + 1 tokens as inputs and the tokens that follow them."""
    inputs = np.zeros((len(samples), length), dtype=np.int64)
    targets = np.full((len(samples), length), IGNORED, dtype=np.int64)
    for row, tokens in enumerate(samples):
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(tokens) - 1] = tokens[1:]
    return {"input_ids": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
