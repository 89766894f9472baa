"""The keys and values of all sequences, in blocks; their memory is taken once and never grows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token on this rank."""

    num_heads: int
    """Key and value heads."""
    key_size: int
    value_size: int

    @property
    def size(self) -> int:
        """Numbers a token."""
        return self.num_heads * (self.key_size + self.value_size)


class KvCache:
    """Two tensors a layer: [blocks, heads, block_size, head size].

    Within a block the tokens of a head lie together, which is how attention reads them.

    Args:
        layers: the shape of each layer, by its number.
        num_blocks: blocks that a sequence's tokens may lie in; each holds `block_size` tokens of all layers.
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size

        def empty(shape: LayerShape, head_size: int) -> torch.Tensor:
            # Zeros, because what no token was written to is read (and masked): a NaN would survive the mask.
            return torch.zeros(num_blocks, shape.num_heads, block_size, head_size, dtype=dtype, device=device)

        self.keys = {layer: empty(shape, shape.key_size) for layer, shape in layers.items()}
        self.values = {layer: empty(shape, shape.value_size) for layer, shape in layers.items()}

    @property
    def memory_bytes(self) -> int:
        """Bytes that the cache takes on this rank."""
        return sum(t.nbytes for side in (self.keys, self.values) for t in side.values())


def block_bytes(layers: dict[int, LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers, on one rank."""
    return sum(shape.size for shape in layers.values()) * block_size * dtype.itemsize
