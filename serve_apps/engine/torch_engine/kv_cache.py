"""The keys and values of the running requests, one row each, in a form that transformers' models use as is.

Memory: two tensors a layer of [max_batch, kv heads of this rank, capacity, head size]. The capacity starts
at 256 tokens and doubles (copying once) when a request grows beyond it, up to the context length; so the
cache never holds more than max_batch × context_length tokens, and nothing is ever computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from serve_apps.engine.torch_engine.step import Move, Step

_FIRST_CAPACITY = 256

_ROUND = 8
"""Decode reads a multiple of these tokens when lengths differ, which keeps the mask's rows aligned."""


@dataclass
class Window:
    """What of the cache the current forward pass reads and writes; shared by all layers.

    Rows `first_row` to `first_row + num_rows`. A prefill writes its tokens from position 0 on and attends to
    nothing else. A decode writes one token at each row's position and attends to the first `length` tokens.
    """

    prefill: bool = True
    first_row: int = 0
    num_rows: int = 0
    length: int = 0
    """Tokens that keys and values have in this pass, the new ones among them."""
    new: int = 0
    """New tokens a row, with padding."""
    positions: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """Where the new token of each row goes in a decode. [rows]"""
    same_position: int | None = None
    """The position of the new token in every row of a decode, when it is the same."""
    slots: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Flat indices of the new tokens, by (heads, capacity)."""


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values; its sizes are those of the first keys it is given."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor
    """Both [max_batch, kv heads, capacity, head size]; there from the first `update` on."""

    def __init__(self, window: Window, max_batch: int, context_length: int) -> None:
        super().__init__()
        self.window = window
        self.max_batch = max_batch
        self.context_length = context_length
        self.capacity = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(self.max_batch, key_states.shape[1], 0, key_states.shape[3])
        self.values = value_states.new_zeros(self.max_batch, value_states.shape[1], 0, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new keys and values; return those to attend to, as views of the cache.

        Args:
            key_states, value_states: [rows, kv heads, new tokens, head size].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        if window.length > self.capacity:
            self._grow(window.length)
        rows = slice(window.first_row, window.first_row + window.num_rows)
        if window.prefill:
            self.keys[rows, :, : window.new] = key_states
            self.values[rows, :, : window.new] = value_states
            return key_states, value_states
        if window.same_position is not None:
            at = window.same_position
            self.keys[rows, :, at] = key_states[:, :, 0]
            self.values[rows, :, at] = value_states[:, :, 0]
        else:
            self._scatter(self.keys, key_states)
            self._scatter(self.values, value_states)
        return self.keys[rows, :, : window.length], self.values[rows, :, : window.length]

    def move(self, move: Move) -> None:
        self.keys[move.target, :, : move.length] = self.keys[move.source, :, : move.length]
        self.values[move.target, :, : move.length] = self.values[move.source, :, : move.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.length, 0

    def get_seq_length(self) -> int:
        return self.window.length - self.window.new

    def get_max_length(self) -> int:
        return self.context_length

    @property
    def memory_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0

    def _scatter(self, cache: torch.Tensor, states: torch.Tensor) -> None:
        # One copy along a flat dimension costs a fraction of what an indexed assignment does.
        num_rows, num_heads, _, head_size = states.shape
        slots = self.window.slots.get((num_heads, self.capacity))
        if slots is None:
            rows = torch.arange(num_rows, device=states.device)[:, None]
            heads = torch.arange(num_heads, device=states.device)[None, :]
            first = (rows * num_heads + heads) * self.capacity
            slots = (first + self.window.positions[:, None]).flatten()
            self.window.slots[num_heads, self.capacity] = slots
        cache.view(-1, head_size).index_copy_(0, slots, states.reshape(-1, head_size))

    def _grow(self, length: int) -> None:
        capacity = max(self.capacity, _FIRST_CAPACITY)
        while capacity < length:
            capacity *= 2
        # A decode reads whole multiples of `_ROUND`, also at the very end.
        capacity = min(capacity, -(-self.context_length // _ROUND) * _ROUND)
        self.keys = self._grown(self.keys, capacity)
        self.values = self._grown(self.values, capacity)
        self.capacity = capacity

    def _grown(self, cache: torch.Tensor, capacity: int) -> torch.Tensor:
        # Zeros, because what no token was written to is read (and masked): a NaN would survive the mask.
        grown = cache.new_zeros(cache.shape[0], cache.shape[1], capacity, cache.shape[3])
        grown[:, :, : self.capacity] = cache
        return grown


class SlotCache(Cache):
    """The cache of all layers, passed to the model as `past_key_values`."""

    def __init__(self, num_layers: int, max_batch: int, context_length: int) -> None:
        self.window = Window()
        self.slot_layers = [SlotLayer(self.window, max_batch, context_length) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def open(self, step: Step, positions: torch.Tensor) -> None:
        """Make the moves of the step, and say what its forward pass will read and write.

        Args:
            positions: of the new tokens, [rows, new tokens].
        """
        for move in step.moves:
            for layer in self.slot_layers:
                layer.move(move)
        window = self.window
        window.first_row, window.num_rows = step.first_row, len(step.tokens)
        window.slots.clear()
        window.prefill = step.is_prefill
        if step.is_prefill:
            window.new = window.length = positions.shape[1]
            return
        longest = max(step.starts) + 1
        window.new = 1
        window.positions = positions[:, 0]
        if min(step.starts) + 1 == longest:
            window.same_position = longest - 1
            window.length = longest
        else:
            window.same_position = None
            window.length = -(-longest // _ROUND) * _ROUND

    @property
    def memory_bytes(self) -> int:
        """Bytes that the cache takes on this rank now."""
        return sum(layer.memory_bytes for layer in self.slot_layers)
