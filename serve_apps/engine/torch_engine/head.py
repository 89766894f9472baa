"""Logits of any tokens of the last pass, in pieces: a whole prompt has vocabulary × tokens of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

PIECE_NUMBERS = 2**24
"""Most logits of one piece: 64 MiB in fp32."""

Place = TypeVar("Place")


class Head:
    """What a model makes of the last hidden states of its decoder.

    The model's own `forward` is run over hidden states that are there already, and not its head alone: some
    models scale or cap what their heads say. On several ranks all have to ask for the same pieces.
    """

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self._rows = max(1, PIECE_NUMBERS // vocab_size)
        self._states: Any = None
        self._decoder.register_forward_hook(self._keep)
        self.reading = False
        """Whether the model runs over hidden states that are there already."""

    def pieces(
        self, places: Sequence[Place], positions: Sequence[int]
    ) -> Iterator[tuple[Sequence[Place], torch.Tensor]]:
        """The places in pieces, each with its logits, [places, vocabulary].

        Args:
            positions: of each place, the position of its token in the flat batch of the last pass.
        """
        states, self._states = self._states, None
        for first in range(0, len(places), self._rows):
            part = slice(first, first + self._rows)
            yield places[part], self._logits(states, positions[part])

    def forget(self) -> None:
        """Let the hidden states of the last pass go."""
        self._states = None

    def _keep(self, module: torch.nn.Module, inputs: Any, states: Any) -> None:
        if not self.reading:
            self._states = states

    @torch.inference_mode()
    def _logits(self, states: Any, positions: Sequence[int]) -> torch.Tensor:
        hidden = states.last_hidden_state
        rows = torch.tensor(positions, device=hidden.device)
        piece = type(states)(**{**states, "last_hidden_state": hidden[:, rows]})
        # An instance's own `forward` goes before its class's.
        self._decoder.forward = lambda *_, **__: piece
        self.reading = True
        try:
            none = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=none, use_cache=False).logits[0]
            return logits
        finally:
            self.reading = False
            del self._decoder.forward
