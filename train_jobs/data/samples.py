"""Packed samples: fixed windows over a token stream."""

from __future__ import annotations

import numpy as np

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

    def sample(self, index: int) -> np.ndarray:
        """The tokens of one sample, int64, [length + 1] (shorter for a kept tail)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.length
        return np.asarray(self.tokens[start : start + self.length + 1], dtype=np.int64)

    @property
    def targets_per_sample(self) -> int:
        return self.length

    def batch(self, indices: list[int]) -> dict[str, np.ndarray]:
        """`input_ids` and `targets` of several samples, each [len(indices), length].

        A short tail is filled up: its inputs with token 0, its targets with IGNORED.
        """
        inputs = np.zeros((len(indices), self.length), dtype=np.int64)
        targets = np.full((len(indices), self.length), IGNORED, dtype=np.int64)
        for row, index in enumerate(indices):
            tokens = self.sample(index)
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, : len(tokens) - 1] = tokens[1:]
        return {"input_ids": inputs, "targets": targets}

    def nothing(self) -> dict[str, np.ndarray]:
        """A batch of one sample of which nothing counts."""
        return {
            "input_ids": np.zeros((1, self.length), dtype=np.int64),
            "targets": np.full((1, self.length), IGNORED, dtype=np.int64),
        }
