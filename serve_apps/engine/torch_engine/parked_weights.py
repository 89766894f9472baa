"""A model's weights while its engine is parked: in host memory, with a digest that knows them again."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_PIECE = 2**20
"""Words that are looked at together: what that takes is small beside a model, and stays in a cache."""
_WORD = 8


class ParkedWeights:
    """Takes a model's weights off its device, and brings them back.

    On a CPU they stay where they are.

    Args:
        model: a torch module; what it computes with are its parameters and buffers.
    """

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._digest = digest(model)
        if device.type == "cuda":
            for tensor in _held(model):
                # Pinned, the way back is several times as fast.
                tensor.data = tensor.data.to("cpu").pin_memory()
            torch.cuda.empty_cache()

    @torch.no_grad()
    def bring_back(self) -> bool:
        """Put them where the model computes; whether they are what they were, bit by bit."""
        for tensor in _held(self._model):
            if tensor.device != self._device:
                tensor.data = tensor.data.to(self._device, non_blocking=True)
        return digest(self._model) == self._digest


@torch.no_grad()
def digest(model: torch.nn.Module) -> int:
    """A number that says which bits a model's weights have, computed where they are.

    The sum of their words of 64 bits, each times an odd number of its own, modulo 2**64: an odd number has
    an inverse there, so that one word that differs always shows, and several do but once in 2**64 times.
    """
    total, at = 0, 0
    for tensor in _held(model):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = flat.numel() // _WORD * _WORD
        rest = torch.zeros(_WORD, dtype=torch.uint8, device=flat.device)
        rest[: flat.numel() - whole] = flat[whole:]
        for words in (flat[:whole], rest):
            for piece in _words(words).split(_PIECE):
                numbers = torch.arange(at, at + piece.numel(), device=piece.device).mul_(2).add_(1)
                total += int(numbers.mul_(piece).sum())
                at += piece.numel()
    return total % 2**64


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Bytes as words; a copy where they do not begin where a word may."""
    return (flat if flat.data_ptr() % _WORD == 0 else flat.clone()).view(torch.int64)


def _held(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What a model computes with, each tensor once, in an order that stays."""
    seen = set()
    for tensor in (*model.parameters(), *model.buffers()):
        local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.numel() and id(tensor) not in seen:
            seen.add(id(tensor))
            yield local
