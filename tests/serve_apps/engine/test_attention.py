"""Attention over blocks against plain attention over whole sequences."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from serve_apps.engine.torch_engine.attention import Batch, paged_attention
from serve_apps.engine.torch_engine.chunk import Chunk
from serve_apps.engine.torch_engine.kv_cache import KvCache, LayerShape
from serve_apps.engine.torch_engine.sweep import make_sweep

CPU = torch.device("cpu")
NUM_BLOCKS = 64


@dataclass
class Known:
    """One sequence: where it lies, all its keys and values, and how many of its tokens are new."""

    blocks: list[int]
    keys: torch.Tensor
    """[tokens, kv heads, size]"""
    values: torch.Tensor
    num_new: int


def plain(
    query: torch.Tensor,
    known: Known,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query: [new, heads, size]; each new token over all tokens up to itself, in float64."""
    groups = query.shape[1] // known.keys.shape[1]
    keys = known.keys.double().repeat_interleave(groups, 1)
    values = known.values.double().repeat_interleave(groups, 1)
    rows = []
    for number, one in enumerate(query.double()):
        end = len(keys) - known.num_new + number + 1
        begin = 0 if window is None else max(0, end - window)
        scores = torch.einsum("hd,thd->ht", one, keys[begin:end]) * query.shape[-1] ** -0.5
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        weights = scores.softmax(-1)[:, : end - begin]
        rows.append(torch.einsum("ht,thd->hd", weights, values[begin:end]))
    return torch.stack(rows)


def sequences_of(chance: random.Random, block_size: int, kv_heads: int, size: int) -> list[Known]:
    """Sequences in scattered blocks, some of which begin in the same ones."""
    free = list(range(NUM_BLOCKS))
    if chance.random() < 0.5:
        chance.shuffle(free)
    made: list[Known] = []
    for _ in range(chance.randint(1, 9)):
        length = chance.randint(1, 5 * block_size)
        shared = 0
        other = chance.choice(made) if made and chance.random() < 0.6 else None
        if other is not None:
            # At least one token is a sequence's own.
            shared = chance.randint(0, min((length - 1) // block_size, len(other.keys) // block_size))
        own = length - shared * block_size
        blocks = [free.pop() for _ in range(-(-own // block_size))]
        keys, values = torch.randn(length, kv_heads, size), torch.randn(length, kv_heads, size)
        if other is not None:
            blocks = other.blocks[:shared] + blocks
            keys[: shared * block_size] = other.keys[: shared * block_size]
            values[: shared * block_size] = other.values[: shared * block_size]
        made.append(Known(blocks, keys, values, 1 if chance.random() < 0.6 else chance.randint(1, own)))
    return sorted(made, key=lambda known: known.num_new > 1)


def batch_of(known: list[Known], cache: KvCache) -> Batch:
    """What attention is told of a step with the new tokens of these sequences; the others are written."""
    size = cache.block_size
    slots, chunks = [], []
    for one in known:
        start = len(one.keys) - one.num_new
        places = [one.blocks[at // size] * size + at % size for at in range(len(one.keys))]
        for at, place in enumerate(places[:start]):
            cache.keys[0][place // size, :, place % size] = one.keys[at]
            cache.values[0][place // size, :, place % size] = one.values[at]
        begin = len(slots)
        slots += places[start:]
        if one.num_new > 1:
            chunks.append(Chunk(slice(begin, len(slots)), start, torch.tensor(one.blocks)))
    single = [one for one in known if one.num_new == 1]
    sweep = (
        make_sweep([o.blocks for o in single], [len(o.keys) for o in single], size, CPU) if single else None
    )
    return Batch(cache, slots=torch.tensor(slots), num_single=len(single), sweep=sweep, chunks=tuple(chunks))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 5}, {"softcap": 1.5}, {"s_aux": True}, {"s_aux": True, "sliding_window": 3}],
    ids=str,
)
def test_is_plain_attention_whatever_lies_where(options: dict[str, Any], groups: int) -> None:
    for seed in range(60):
        torch.manual_seed(seed)
        chance = random.Random(seed)
        block_size, kv_heads, size = chance.choice([1, 4, 8]), chance.choice([1, 2]), 8
        known = sequences_of(chance, block_size, kv_heads, size)
        shape = LayerShape(kv_heads, size, size)
        cache = KvCache({0: shape}, NUM_BLOCKS, block_size, torch.float32, CPU)
        module: Any = torch.nn.Module()
        module.layer_idx = 0
        batch_of(known, cache).bind(module)
        heads = kv_heads * groups
        sinks = torch.randn(heads) if options.get("s_aux") else None
        query = torch.randn(sum(one.num_new for one in known), heads, size)
        new_keys = torch.cat([one.keys[-one.num_new :] for one in known])
        new_values = torch.cat([one.values[-one.num_new :] for one in known])

        def flat(states: torch.Tensor) -> torch.Tensor:
            return states.transpose(0, 1)[None]

        output, _ = paged_attention(
            module, flat(query), flat(new_keys), flat(new_values), None, **{**options, "s_aux": sinks}
        )
        at = 0
        for one in known:
            expected = plain(
                query[at : at + one.num_new],
                one,
                options.get("sliding_window"),
                options.get("softcap"),
                sinks,
            )
            found = output[0, at : at + one.num_new].double()
            assert torch.allclose(found, expected, atol=1e-5), (seed, one)
            at += one.num_new


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("start", "new", "window", "sinks"),
    [
        (700, 600, None, False),
        (0, 600, None, True),
        (700, 300, None, True),
        (700, 600, 9, True),
        (0, 700, 40, False),
    ],
)
def test_long_chunks_are_plain_attention_too(
    start: int, new: int, window: int | None, sinks: bool, scattered: bool
) -> None:
    """Beyond the tiles of fused kernels, where whole tiles may be hidden from a token."""
    torch.manual_seed(start + new)
    size, length, heads = 32, start + new, 4
    num_blocks = -(-length // size)
    blocks = torch.randperm(num_blocks + 8)[:num_blocks] if scattered else torch.arange(8, num_blocks + 8)
    known = Known(blocks.tolist(), torch.randn(length, 2, 8), torch.randn(length, 2, 8), new)
    cache = KvCache({0: LayerShape(2, 8, 8)}, num_blocks + 8, size, torch.float32, CPU)
    module: Any = torch.nn.Module()
    module.layer_idx = 0
    batch_of([known], cache).bind(module)
    query = torch.randn(new, heads, 8)
    logits = torch.randn(heads) if sinks else None
    states = (query, known.keys[start:], known.values[start:])
    output, _ = paged_attention(
        module, *(s.transpose(0, 1)[None] for s in states), None, sliding_window=window, s_aux=logits
    )
    for row in (0, 1, new // 2, new - 1):
        one = Known(known.blocks, known.keys[: start + row + 1], known.values[: start + row + 1], 1)
        expected = plain(query[row : row + 1], one, window, None, logits)
        assert torch.allclose(output[0, row : row + 1].double(), expected, atol=1e-5), row


def test_nothing_is_masked_where_causality_says_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of every token beside every other costs a piece of a long prompt as much as its attention."""
    monkeypatch.setattr(Chunk, "mask", lambda *_: pytest.fail("a mask was made"))
    test_long_chunks_are_plain_attention_too(700, 600, None, False, False)


def test_what_no_token_was_written_to_changes_nothing() -> None:
    """Blocks are given away with what they held; rubbish beyond a sequence's end must not be seen."""
    shape = LayerShape(1, 4, 4)
    outputs = []
    for rubbish in (0.0, 1e30):
        torch.manual_seed(1)
        cache = KvCache({0: shape}, 4, 8, torch.float32, CPU)
        cache.keys[0].fill_(rubbish)
        cache.values[0].fill_(rubbish)
        known = [Known([2], torch.randn(3, 1, 4), torch.randn(3, 1, 4), 1)]
        module: Any = torch.nn.Module()
        module.layer_idx = 0
        batch_of(known, cache).bind(module)
        query = torch.randn(1, 2, 1, 4)
        new = [states[-1:].transpose(0, 1)[None] for states in (known[0].keys, known[0].values)]
        outputs.append(paged_attention(module, query, new[0], new[1], None)[0])
    assert torch.equal(outputs[0], outputs[1])


def test_a_shared_beginning_is_multiplied_once_for_all() -> None:
    tables = [[0, 1, 2, 3, 10 + row] for row in range(8)]
    sweep = make_sweep(tables, [4 * 4 + 2] * 8, 4, CPU)
    by_users = {part.rows.shape[1]: part.rows.shape[0] for part in sweep.parts}
    assert by_users == {1: 8, 8: 4}


def test_blocks_in_a_row_are_read_where_they_lie() -> None:
    tables = [[3, 5, 4], [8, 7, 9], [40], [60]]
    sweep = make_sweep(tables, [12, 12, 4, 4], 4, CPU)
    runs = [part.blocks for part in sweep.parts]
    assert slice(3, 10) in runs
    gathered = [blocks.tolist() for blocks in runs if isinstance(blocks, torch.Tensor)]
    assert gathered == [[40, 60]]
