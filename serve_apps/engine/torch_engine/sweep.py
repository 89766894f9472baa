"""How one decode step reads the blocks of the KV cache: in long runs, each block once for its users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

_GAP = 4
"""A run goes on over so many blocks that nobody uses: reading them costs less than another multiplication."""

_SHORT = 4
"""Runs below this length are gathered into one copy."""


@dataclass(frozen=True)
class SweepPart:
    """Blocks that are multiplied together, each with the queries of the same number of sequences."""

    blocks: slice | torch.Tensor
    """A run of blocks, or the numbers of some."""
    rows: torch.Tensor
    """The sequences that use each block, [blocks, users]; where there are fewer, any row, hidden."""
    hidden: torch.Tensor
    """0 where a sequence sees the token and minus infinity where it does not, [blocks, users, block_size]."""
    first_pair: int
    """The number of the first (block, user) of this part among all pairs of the sweep."""

    @property
    def num_pairs(self) -> int:
        return self.rows.numel()


@dataclass
class Sweep:
    """All parts of one decode step, and how the results of their pairs come together."""

    parts: tuple[SweepPart, ...]
    num_pairs: int
    row_of_pair: torch.Tensor
    """[pairs]"""
    pairs_of_row: torch.Tensor
    """[rows, most pairs of a row]; filled up with `num_pairs`, which stands for nothing."""
    positions: tuple[torch.Tensor, ...] = ()
    """Of each part: the position of each token in each user's sequence, less that of its newest token."""
    _windows: dict[int, tuple[SweepPart, ...]] = field(default_factory=dict)

    def within(self, window: int) -> tuple[SweepPart, ...]:
        """The parts for layers in which a token sees only the last `window` tokens, itself among them."""
        if window not in self._windows:
            self._windows[window] = tuple(
                SweepPart(
                    part.blocks,
                    part.rows,
                    part.hidden.masked_fill(position <= -window, float("-inf")),
                    part.first_pair,
                )
                for part, position in zip(self.parts, self.positions, strict=True)
            )
        return self._windows[window]


def make_sweep(
    tables: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int, device: torch.device
) -> Sweep:
    """The sweep of a decode step.

    Args:
        tables: of each sequence, its blocks; those beyond its length are not looked at.
        lengths: of each sequence, its tokens with the newest.
    """
    counts = [-(-length // block_size) for length in lengths]
    blocks = np.concatenate([np.asarray(t[:c]) for t, c in zip(tables, counts, strict=True)])
    rows = np.repeat(np.arange(len(tables)), counts)
    numbers = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort(blocks, kind="stable")
    used, first, users = np.unique(blocks[order], return_index=True, return_counts=True)
    ends = np.asarray(lengths) - 1
    builder = _Builder(block_size, device)
    # Blocks of 1 user, of 2, of up to 4, of up to 8, …: at most half of a part's queries are filled in.
    widths = np.where(users == 1, 1, 2 ** np.ceil(np.log2(np.maximum(users, 2))).astype(int))
    for width in np.unique(widths):
        chosen = np.flatnonzero(widths == width)
        for blocks_of_part, members in _runs(used[chosen], chosen):
            shape = (len(members), int(width))
            part_rows = np.zeros(shape, dtype=np.int64)
            part_ends = np.full(shape, -1, dtype=np.int64)
            part_starts = np.zeros(shape, dtype=np.int64)
            present = np.flatnonzero(members >= 0)
            for user in range(int(width)):
                having = present[users[members[present]] > user]
                pairs = order[first[members[having]] + user]
                part_rows[having, user] = rows[pairs]
                part_ends[having, user] = ends[rows[pairs]]
                part_starts[having, user] = numbers[pairs] * block_size
            builder.add(blocks_of_part, part_rows, part_starts, part_ends)
    return builder.finish(len(tables))


def _runs(blocks: np.ndarray, members: np.ndarray) -> list[tuple[slice | np.ndarray, np.ndarray]]:
    """Cut rising block numbers into runs; members[i] stands for blocks[i], and -1 for one between them."""
    cuts = np.flatnonzero(np.diff(blocks) > _GAP) + 1
    result: list[tuple[slice | np.ndarray, np.ndarray]] = []
    lone_blocks, lone_members = [], []
    for run, own in zip(np.split(blocks, cuts), np.split(members, cuts), strict=True):
        if len(run) < _SHORT:
            lone_blocks.append(run)
            lone_members.append(own)
            continue
        filled = np.full(run[-1] - run[0] + 1, -1)
        filled[run - run[0]] = own
        result.append((slice(int(run[0]), int(run[-1]) + 1), filled))
    if lone_blocks:
        result.append((np.concatenate(lone_blocks), np.concatenate(lone_members)))
    return result


class _Builder:
    """Puts the parts of a sweep one behind the other."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._offsets = np.arange(block_size)
        self._device = device
        self._parts: list[SweepPart] = []
        self._positions: list[torch.Tensor] = []
        self._rows: list[np.ndarray] = []
        self._real: list[np.ndarray] = []
        self._num_pairs = 0

    def add(self, blocks: slice | np.ndarray, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """rows, starts (position of a block's first token) and ends (of the newest): [blocks, users]."""
        positions = starts[..., None] + self._offsets - ends[..., None]
        hidden = np.where((positions > 0) | (ends < 0)[..., None], -np.inf, 0.0).astype(np.float32)
        self._parts.append(
            SweepPart(
                blocks if isinstance(blocks, slice) else self._tensor(blocks),
                self._tensor(rows),
                self._tensor(hidden),
                self._num_pairs,
            )
        )
        self._positions.append(self._tensor(positions))
        self._rows.append(rows.ravel())
        self._real.append((ends >= 0).ravel())
        self._num_pairs += rows.size

    def finish(self, num_rows: int) -> Sweep:
        row_of_pair = np.concatenate(self._rows)
        real = np.flatnonzero(np.concatenate(self._real))
        order = real[np.argsort(row_of_pair[real], kind="stable")]
        counts = np.bincount(row_of_pair[real], minlength=num_rows)
        pairs_of_row = np.full((num_rows, counts.max()), self._num_pairs)
        pairs_of_row[np.arange(counts.max()) < counts[:, None]] = order
        return Sweep(
            tuple(self._parts),
            self._num_pairs,
            self._tensor(row_of_pair),
            self._tensor(pairs_of_row),
            tuple(self._positions),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
