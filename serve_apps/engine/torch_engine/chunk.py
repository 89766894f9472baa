"""Attention of new tokens that are read together: a prompt, or a piece of it.

What they see of themselves is causal, what lies before them they see whole. The two are computed apart and
put together by their softmax sums (the split of flash-decoding, Dao et al. 2023): neither needs a mask, which
costs a CPU half as much again, and nothing is computed that is masked away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

_LONG_RUNS = 4
"""Blocks a run, on average, from which on copying run by run costs less than picking block by block."""

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""PyTorch's own fused attention on a CPU, which beside its result tells the logarithm of its softmax sums."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """New tokens of one sequence that are read together."""

    tokens: slice
    """Where they are in the flat batch."""
    start: int
    """Position of the first."""
    blocks: torch.Tensor
    """The sequence's blocks up to the last of these tokens."""
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)
    _runs: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    """Both: what was made for one layer serves the others."""

    @property
    def num_new(self) -> int:
        return self.tokens.stop - self.tokens.start

    @property
    def length(self) -> int:
        """Tokens of the sequence up to the last of these."""
        return self.start + self.num_new

    def first_seen(self, window: int | None) -> int:
        """Position of the first token that any of these sees."""
        return 0 if window is None else max(0, self.start - window + 1)

    def runs(self, first: int, end: int) -> list[tuple[int, int]]:
        """The sequence's blocks from one number to another as runs of neighbours: (first block, blocks)."""
        if (first, end) not in self._runs:
            runs: list[tuple[int, int]] = []
            for block in self.blocks[first:end].tolist():
                if runs and block == sum(runs[-1]):
                    runs[-1] = (runs[-1][0], runs[-1][1] + 1)
                else:
                    runs.append((block, 1))
            self._runs[first, end] = runs
        return self._runs[first, end]

    def mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """0 where a new token sees another and minus infinity where not: [new, length - first_seen]."""
        if (window, dtype) not in self._masks:
            own = torch.arange(self.start, self.length, device=device)[:, None]
            others = torch.arange(self.first_seen(window), self.length, device=device)
            hidden = others > own
            if window is not None:
                hidden |= others <= own - window
            made = torch.zeros(hidden.shape, dtype=dtype, device=device)
            self._masks[window, dtype] = made.masked_fill_(hidden, float("-inf"))
        return self._masks[window, dtype]


def attend(
    chunk: Chunk,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a chunk to itself and to what its sequence has in the cache.

    Args:
        query: [1, query heads, new, head size].
        key, value: the chunk's own, [1, kv heads, new, head size].
        cache: keys and values of this layer, [blocks, kv heads, block_size, head size].
        window: a token sees so many, itself among them; None: all up to itself.
        sinks: a logit a query head, [query heads], that takes its part of the softmax and gives nothing.

    Returns:
        [new, query heads, value size]
    """
    if window is not None and window >= chunk.length:
        window = None
    fused = query.device.type == "cpu" and softcap is None and key.shape[3] == value.shape[3]
    if fused and window is None:
        parts = [_fused(query, key, value, is_causal=True, scale=scale)]
        if chunk.start:
            parts.append(_before(query, *_seen(chunk, cache, 0, chunk.start), scale))
        return _together(parts, sinks).to(query.dtype)
    if chunk.start or window is not None:
        key, value = _seen(chunk, cache, chunk.first_seen(window), chunk.length)
    if fused:
        mask = chunk.mask(window, query.dtype, query.device)
        return _together([_fused(query, key, value, attn_mask=mask, scale=scale)], sinks).to(query.dtype)
    if softcap is None and sinks is None:
        plainly_causal = chunk.start == 0 and window is None
        attended = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if plainly_causal else chunk.mask(window, query.dtype, query.device),
            is_causal=plainly_causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        mask = chunk.mask(window, torch.float32, query.device)
        attended = _plain(query, key, value, mask, scale, softcap, sinks)
    return attended[0].transpose(0, 1)


def _seen(
    chunk: Chunk, cache: tuple[torch.Tensor, torch.Tensor], first: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values from one position of the sequence to another: [1, kv heads, tokens, head size]."""
    size = cache[0].shape[2]
    skipped, last = first // size, -(-end // size)
    runs = chunk.runs(skipped, last)

    def gathered(side: torch.Tensor) -> torch.Tensor:
        if len(runs) * _LONG_RUNS <= last - skipped:
            picked = torch.cat([side[at : at + count].transpose(0, 1) for at, count in runs], dim=1)
        else:
            picked = side.transpose(0, 1).index_select(1, chunk.blocks[skipped:last])
        flat = picked.reshape(1, picked.shape[0], -1, picked.shape[3])
        return flat[:, :, first - skipped * size : end - skipped * size]

    return gathered(cache[0]), gathered(cache[1])


def _before(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to keys that every query sees, and the logarithm of its softmax sums.

    Query heads that share keys stand as more queries of one head: the keys are read once for all of them.
    """
    heads, new, kv_heads = query.shape[1], query.shape[2], keys.shape[1]
    mixed, sums = _fused(query.reshape(1, kv_heads, -1, query.shape[3]), keys, values, scale=scale)
    return mixed.reshape(1, heads, new, -1), sums.reshape(1, heads, new)


def _together(parts: list[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None) -> torch.Tensor:
    """One softmax over what each part saw: from [1, heads, new, size] to [new, heads, size]."""
    if len(parts) == 1 and sinks is None:
        return parts[0][0][0].transpose(0, 1)
    sums = [found.float() for _, found in parts]
    if sinks is not None:
        sums.append(sinks.float().view(1, -1, 1).expand_as(sums[0]))
    shares = torch.stack(sums).softmax(dim=0)
    result = sum(share[..., None] * mixed for share, (mixed, _) in zip(shares, parts, strict=False))
    assert isinstance(result, torch.Tensor)
    return result[0].transpose(0, 1)


def _plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with what `scaled_dot_product_attention` does not know."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    scores = (query @ keys.mT).float() * scale
    if softcap is not None:
        scores = (scores / softcap).tanh_() * softcap
    scores += mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(values.dtype) @ values
