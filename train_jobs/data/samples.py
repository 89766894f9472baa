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
        ends = np.append(starts[1:], len(tokens)).astype(np.int64)
        targets = ends - starts.astype(np.int64) - 1
        pieces = np.maximum(0, -(-targets // length))
        offsets = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.starts = np.repeat(starts.astype(np.int64), pieces) + offsets * length
        self.ends = np.minimum(self.starts + length + 1, np.repeat(ends, pieces))

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def targets_per_sample(self) -> int:
        return self.length

    def arrangement(self) -> Arrangement:
        if self.group_by_length:
            return LengthGrouped(self.ends - self.starts, self.micro)
        return Shuffled(len(self))

    def batch(self, indices: Sequence[int], keys: Sequence[Sequence[int]] | None = None) -> Batch:
        """`input_ids` and `targets`, each [len(indices), longest of them]; padding is token 0 and IGNORED."""
        samples = [self.tokens[self.starts[index] : self.ends[index]] for index in indices]
        longest = max(len(sample) - 1 for sample in samples)
        return padded(samples, -(-longest // self.multiple) * self.multiple)


def padded(samples: Sequence[np.ndarray], length: int) -> Batch:
    """Samples of up to `length` + 1 tokens as inputs and the tokens that follow them."""
    inputs = np.zeros((len(samples), length), dtype=np.int64)
    targets = np.full((len(samples), length), IGNORED, dtype=np.int64)
    for row, tokens in enumerate(samples):
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(tokens) - 1] = tokens[1:]
    return {"input_ids": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
