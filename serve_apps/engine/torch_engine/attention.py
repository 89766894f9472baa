"""Attention over the blocks of the KV cache, called by transformers' models in place of their own.

Decoding reads every block where it lies, for all sequences in one sweep: the blocks in use are cut into runs
of neighbours, each run is multiplied with the queries of those who use it, and the parts of every sequence
are put together by their softmax sums (the split of flash-decoding, Dao et al. 2023). A block that several
sequences share is read once for all of them (Hydragen, Juravsky et al. 2024). Nothing is copied or padded,
which on a CPU is several times as fast as `scaled_dot_product_attention` over padded rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from serve_apps.engine.protocol import EngineError
from serve_apps.engine.torch_engine.chunk import Chunk, attend
from serve_apps.engine.torch_engine.kv_cache import KvCache
from serve_apps.engine.torch_engine.sweep import Sweep, SweepPart

NAME = "shoal_paged"
"""The attention's name among transformers' own."""

CHANGES_NOTHING = frozenset(
    {
        "dropout",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "is_causal",
        "labels",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)
"""Arguments that models hand to attention, and that tell this one nothing: what they say was looked at when
the model was tried, or is known already."""

_ATTRIBUTE = "shoal_batch"

_LOWEST = -1e30
"""In place of minus infinity where a difference is taken: two of them would give NaN."""


@dataclass
class Batch:
    """What the attention of the current forward pass works on; all layers share it."""

    cache: KvCache | None = None
    """None until the model was tried, and its layers' shapes are known."""
    slots: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Where each token of the flat batch is written: block × block_size + offset."""
    num_single: int = 0
    """The first tokens of the flat batch are single new tokens of as many sequences."""
    sweep: Sweep | None = None
    """How their attention is computed."""
    chunks: tuple[Chunk, ...] = ()
    """The tokens behind those."""
    flat_slots: dict[int, torch.Tensor] = field(default_factory=dict)
    """Where each head of each token is written, by number of heads."""

    def bind(self, model: torch.nn.Module) -> None:
        """Let the attention of this model find the batch."""
        for module in model.modules():
            if getattr(module, "layer_idx", None) is not None:
                setattr(module, _ATTRIBUTE, self)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values to the cache, and attend to all of each sequence's own.

    Args:
        query: [1, query heads, tokens, head size].
        key, value: [1, kv heads, tokens, head size].
        s_aux: a logit a head that takes its part of the softmax and gives nothing (attention sinks).

    Returns:
        ([1, tokens, query heads, head size], None)

    Raises:
        EngineError: a mask, or an argument that is not known.
    """
    batch: Batch = getattr(module, _ATTRIBUTE)
    layer: int = module.layer_idx  # type: ignore[assignment]
    assert batch.cache is not None
    if attention_mask is not None or not other.keys() <= CHANGES_NOTHING:
        # `first_passes.py` has seen neither; better no tokens than others.
        raise EngineError(f"layer {layer} asks attention for what the torch engine does not do")
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    _write(batch, batch.cache.keys[layer], key)
    _write(batch, batch.cache.values[layer], value)
    if batch.sweep is not None:
        single = query[0, :, : batch.num_single].transpose(0, 1)
        keys, values = batch.cache.keys[layer], batch.cache.values[layer]
        output[: batch.num_single] = _decode(
            batch.sweep, single, keys, values, scale, sliding_window, softcap, s_aux
        )
    for chunk in batch.chunks:
        output[chunk.tokens] = attend(
            chunk,
            query[:, :, chunk.tokens],
            key[:, :, chunk.tokens],
            value[:, :, chunk.tokens],
            (batch.cache.keys[layer], batch.cache.values[layer]),
            scale,
            sliding_window,
            softcap,
            s_aux,
        )
    return output[None], None


def _write(batch: Batch, cache: torch.Tensor, states: torch.Tensor) -> None:
    # One copy along a flat dimension costs a fraction of what an indexed assignment does.
    num_heads, block_size = cache.shape[1], cache.shape[2]
    slots = batch.flat_slots.get(num_heads)
    if slots is None:
        blocks, offsets = batch.slots // block_size, batch.slots % block_size
        heads = torch.arange(num_heads, device=cache.device)[:, None]
        slots = ((blocks * num_heads + heads) * block_size + offsets).flatten()
        batch.flat_slots[num_heads] = slots
    cache.view(-1, cache.shape[3]).index_copy_(0, slots, states[0].reshape(-1, cache.shape[3]))


def _decode(
    sweep: Sweep,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one new token a sequence.

    Args:
        query: [sequences, query heads, head size].
        keys, values: the cache of this layer.
    """
    num_rows, num_heads = query.shape[:2]
    kv_heads, group = keys.shape[1], num_heads // keys.shape[1]
    query = (query * scale).view(num_rows, kv_heads, group, -1)
    most = torch.full((sweep.num_pairs + 1, kv_heads, group), _LOWEST, device=query.device)
    total = most.new_zeros(most.shape)
    mixed = most.new_zeros((*most.shape, values.shape[-1]))
    parts = sweep.parts if window is None else sweep.within(window)
    for part in parts:
        at = slice(part.first_pair, part.first_pair + part.num_pairs)
        most[at], total[at], mixed[at] = _part(part, query, keys, values, softcap)
    # What each pair of a sequence and a block found counts by its share of the sequence's whole softmax.
    highest = most[sweep.pairs_of_row].amax(dim=1)
    if sinks is not None:
        sinks = sinks.view(1, kv_heads, group).float()
        highest = torch.maximum(highest, sinks)
    pairs = slice(0, sweep.num_pairs)
    weight = (most[pairs] - highest[sweep.row_of_pair]).exp()
    whole = highest.new_zeros(highest.shape).index_add_(0, sweep.row_of_pair, weight * total[pairs])
    if sinks is not None:
        whole += (sinks - highest).exp()
    result = mixed.new_zeros((*highest.shape, values.shape[-1]))
    result.index_add_(0, sweep.row_of_pair, mixed[pairs] * weight[..., None])
    return (result / whole[..., None]).view(num_rows, num_heads, -1)


def _part(
    part: SweepPart, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Highest score, sum of exponentials, weighted values: each [pairs, kv heads, group(, size)]."""
    kv_heads, group, head_size = query.shape[1:]
    users = part.rows.shape[1]
    blocks = len(part.rows)
    keys = (keys[part.blocks]).reshape(blocks * kv_heads, -1, head_size)
    values = (values[part.blocks]).reshape(blocks * kv_heads, keys.shape[1], -1)
    queries = query[part.rows]
    if users > 1:
        queries = queries.transpose(1, 2)
    scores = torch.bmm(queries.reshape(blocks * kv_heads, users * group, head_size), keys.mT).float()
    if softcap is not None:
        scores = (scores / softcap).tanh_() * softcap
    scores = scores.view(blocks, kv_heads, users, group, -1)
    scores += part.hidden[:, None, :, None]
    most = scores.amax(dim=-1).clamp_(min=_LOWEST)
    weights = scores.sub_(most[..., None]).exp_()
    total = weights.sum(dim=-1)
    mixed = torch.bmm(weights.view(blocks * kv_heads, users * group, -1).to(values.dtype), values).float()
    mixed = mixed.view(blocks, kv_heads, users, group, -1)

    def by_pair(found: torch.Tensor) -> torch.Tensor:
        return found.transpose(1, 2).flatten(0, 1)

    return by_pair(most), by_pair(total), by_pair(mixed)


AttentionInterface.register(NAME, paged_attention)
