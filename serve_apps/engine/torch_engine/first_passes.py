"""A model's first passes: whether what it computes is what this engine computes of many sequences at once.

The engine takes over one thing of a model, its attention, and puts the tokens of all sequences into one row.
That is right where a layer sees other tokens through one call of attention alone, which hides from a token
those behind it and those before its window, and nothing else. No config says whether that is so, and families
of transformers differ in many ways. So every model is tried with a few tokens before it may answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from serve_apps.engine.protocol import EngineError
from serve_apps.engine.torch_engine import attention
from serve_apps.engine.torch_engine.kv_cache import LayerShape

Forward = Callable[[torch.Tensor, torch.Tensor, list[int]], torch.Tensor]
"""From token ids and positions, both [1, tokens], and places among them to the logits there,
[places, vocabulary]."""

_BARE = "shoal_first"
_MASKED = "shoal_first_masked"
"""The attention of these passes among transformers' own: without the masks of transformers, and with them."""

_ATTRIBUTE = "shoal_first_pass"
_RULE = "shoal_rule"
"""What a mask of transformers was made by; what a model makes of such a mask does not have it."""

_NUM_TOKENS = 16
_KEPT = (2, 5, 9, 14)
"""Tokens of the first pass that come again in the second, at the same positions, but elsewhere in the row."""
_MOVED_BY = 5


@dataclass
class FirstPass:
    """What attention is called with in the current pass."""

    context: int
    """Most tokens of a sequence."""
    masked: bool = False
    """Whether transformers' masks are there to be looked at."""
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    """By layer."""
    windows: dict[int, int | None] = field(default_factory=dict)
    """By layer: how many tokens one sees; None: all up to itself."""
    seen: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layer: queries, keys and values of each token, [tokens, numbers]."""
    faults: list[str] = field(default_factory=list)
    """What this engine cannot do, said of the model."""


def try_model(
    model: Any, model_path: str, forward: Forward, vocab_size: int, context: int
) -> dict[int, LayerShape]:
    """What each layer keeps of a token, found by running the model.

    All ranks of a replica run the same passes, whatever one of them finds.

    Args:
        model: as `load_model` gives it.
        forward: runs it.
        context: most tokens of a sequence.

    Raises:
        EngineError: this engine would give other tokens than the model; the message says why.
    """
    kind = f"{model_path} is of the family {model.config.model_type}"
    count = min(_NUM_TOKENS, context)
    chance = random.Random(7)
    one, other = ([chance.randrange(vocab_size) for _ in range(count)] for _ in range(2))
    places, others = (chance.sample(range(context), count) for _ in range(2))
    kept = [at for at in _KEPT if at < count]
    moved = [(at + _MOVED_BY) % count for at in kept]
    for at, to in zip(kept, moved, strict=True):
        other[to], others[to] = one[at], places[at]
    try:
        plain, _ = _run(model, _MASKED, forward, one, list(range(count)), context, [0])
        plain.faults += _forgotten(model.config, plain)
        first, logits = _run(model, _BARE, forward, one, places, context, kept)
        second, again = _run(model, _BARE, forward, other, others, context, moved)
    except (EngineError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Whatever a family's own code makes of being run in this way.
        raise EngineError(f"{kind}, which the torch engine cannot run: {error!r}") from error
    faults = plain.faults or first.faults or second.faults
    if not faults and len(logits) != len(kept):
        faults = ["whose head is not one that gives each token its logits"]
    if not faults and (layer := _first_mixed(first, second, kept, moved, logits, again)) is not None:
        faults = [
            f"which looks at other tokens, or at a token's place in the batch, beside attention ({layer})"
        ]
    if faults:
        raise EngineError(f"{kind}, {faults[0]}, which the torch engine cannot run")
    return plain.shapes


def _run(
    model: Any,
    name: str,
    forward: Forward,
    tokens: list[int],
    positions: list[int],
    context: int,
    picked: list[int],
) -> tuple[FirstPass, torch.Tensor]:
    this = FirstPass(context, masked=name == _MASKED)
    with _attention(model, name, this):
        logits = forward(torch.tensor([tokens]), torch.tensor([positions]), picked)
    if not this.shapes and not this.faults:
        this.faults.append("whose attention is one of its own")
    return this, logits


@contextmanager
def _attention(model: Any, name: str, this: FirstPass) -> Iterator[None]:
    """Let a model call the attention of a first pass."""
    for module in model.modules():
        setattr(module, _ATTRIBUTE, this)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(attention.NAME)
        for module in model.modules():
            delattr(module, _ATTRIBUTE)


def _note(
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
    """Note a call of attention, in which every token sees itself alone.

    Args:
        query, key, value: as in `paged_attention`.

    Returns:
        ([1, tokens, query heads, head size], None)
    """
    this: FirstPass = getattr(module, _ATTRIBUTE)
    layer = getattr(module, "layer_idx", None)
    num_tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    fault = None
    if not isinstance(layer, int):
        fault = "whose attention says of no layer which one it is"
    elif layer in this.shapes:
        fault = f"which calls attention more than once in one layer ({layer})"
    elif unknown := sorted(other.keys() - attention.CHANGES_NOTHING):
        fault = f"whose attention takes {', '.join(unknown)}"
    elif other.get("dropout"):
        fault = "whose attention drops some of what it sees"
    elif (
        key.shape[2] != num_tokens or value.shape[2] != num_tokens or groups * key.shape[1] != query.shape[1]
    ):
        fault = "whose attention has other keys than one of each token"
    elif this.masked and not _is_ours(this.context, module, attention_mask, sliding_window, other):
        fault = f"whose attention hides tokens by a rule of its own (layer {layer})"
    elif not this.masked and attention_mask is not None:
        fault = f"whose attention has a mask of its own (layer {layer})"
    if fault is not None:
        this.faults.append(fault)
        return query.new_zeros(1, num_tokens, query.shape[1], value.shape[3]), None
    assert isinstance(layer, int)
    this.windows[layer] = sliding_window
    this.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
    rows = [states[0].transpose(0, 1).flatten(1) for states in (query, key, value)]
    this.seen[layer] = torch.cat(rows, dim=1)
    return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None


def _is_ours(
    context: int,
    module: torch.nn.Module,
    mask: torch.Tensor | None,
    window: int | None,
    other: dict[str, Any],
) -> bool:
    """Whether a mask hides from a token those behind it and those before its window, and nothing else."""
    if mask is None:
        # What transformers' own attention does without one.
        causal = other.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        return bool(causal) and (window is None or window >= context)
    rule = getattr(mask, _RULE, None)
    if rule is None or _knows_tokens(rule):
        return False
    near = [1, 2, context, *(2**power for power in range(2, context.bit_length()))]
    near += [] if window is None else [window, 2 * window, context - window]
    at = torch.tensor(
        sorted({to for place in near for to in range(place - 2, place + 2) if 0 <= to < context})
    )
    # As transformers does: [batch, heads, queries, keys].
    zero, own, others = torch.zeros(1, 1, 1, 1, dtype=torch.long), at[:, None], at[None]
    seen = rule(zero, zero, own[None, None], others[None, None])
    expected = others <= own
    if window is not None:
        expected &= others > own - window
    return bool(torch.equal(seen.expand(1, 1, *expected.shape)[0, 0], expected))


def _knows_tokens(rule: Any) -> bool:
    """Whether a mask's rule has something of each token, and not of positions alone."""
    cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    parts = [part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,))]
    return any(isinstance(part, torch.Tensor) or (callable(part) and _knows_tokens(part)) for part in parts)


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any, device: Any, **other: Any
) -> torch.Tensor:
    """A mask of transformers that tells by which rule it was made."""
    other["allow_is_causal_skip"] = other["allow_is_bidirectional_skip"] = False
    mask = sdpa_mask(batch_size, q_length, kv_length, mask_function=mask_function, device=device, **other)
    setattr(mask, _RULE, mask_function)
    assert mask is not None
    return mask


def _forgotten(config: Any, this: FirstPass) -> list[str]:
    """Layers of which `generate` keeps fewer tokens than they see: its cache goes by the config alone."""
    kept = DynamicCache(config=config).layers
    for layer, window in this.windows.items():
        most = getattr(kept[layer], "sliding_window", None) if layer < len(kept) else None
        if most is not None and most < this.context and most != window:
            return [f"which forgets tokens that attention sees (layer {layer}, after {most})"]
    return []


def _first_mixed(
    first: FirstPass,
    second: FirstPass,
    kept: list[int],
    moved: list[int],
    logits: torch.Tensor,
    again: torch.Tensor,
) -> str | None:
    """Where most of the tokens that are in both passes are not the same any more, if anywhere."""
    if first.seen.keys() != second.seen.keys():
        return "which layers there are"
    pairs = [(f"layer {layer}", rows[kept], second.seen[layer][moved]) for layer, rows in first.seen.items()]
    for name, rows, others in [*pairs, ("the head", logits, again)]:
        tolerance = torch.finfo(rows.dtype).eps ** 0.5
        apart = (rows.float() - others.float()).norm(dim=1) > tolerance * rows.float().norm(dim=1)
        # Rounding may send a single token to another expert; most of them it does not.
        if 2 * int(apart.sum()) > len(apart):
            return name
    return None


AttentionInterface.register(_BARE, _note)
AttentionInterface.register(_MASKED, _note)
AttentionMaskInterface.register(_MASKED, _mask)
