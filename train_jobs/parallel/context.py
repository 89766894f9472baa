"""Context parallelism: the ranks of the `cp` axis share every sequence; each computes its part of the tokens.

Only attention looks beyond a rank's own tokens. It is put behind transformers' registry of attention
functions:

- `gather`: keys and values are all-gathered (Llama 3, 2024, section 3.3.2); queries stay where they are.
- `ulysses`: an all-to-all exchanges tokens for heads before attention and back after it (Jacobs et al.,
  DeepSpeed-Ulysses, 2023).
- `ring`: torch's own ring attention (Liu et al., 2023), on CUDA only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cluster.errors import RequestError
from train_jobs.parallel.mesh import Mesh

POSITIONS = "position_ids"


class ContextParallelism:
    """Cuts batches along the sequence, and lets a model attend to the whole of it.

    Args:
        method: `parallel.context_method`.
    """

    def __init__(self, model: PreTrainedModel, mesh: Mesh, method: str) -> None:
        self.mesh = mesh
        self.method = method
        _check_attention(model)
        if method == "ring":
            return
        # The registry is global, and a process may hold two groups one after the other.
        name = f"shoal_context_{method}"
        attention = GatherAttention if method == "gather" else UlyssesAttention
        AttentionInterface.register(name, attention(mesh.cp_group))
        model.set_attn_implementation(name)

    @contextmanager
    def share(self, batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """This rank's part of a batch, around its forward and backward.

        Args:
            batch: tensors [samples, length] whose second dim is the sequence.
        """
        length = next(iter(batch.values())).shape[1]
        positions = torch.arange(length, device=self.mesh.device)[None]
        whole = {**batch, POSITIONS: positions}
        if self.method == "ring":
            from torch.distributed.tensor.experimental import context_parallel

            mine = {name: tensor.clone() for name, tensor in whole.items()}
            buffers = list(mine.values())
            with context_parallel(
                self.mesh.axes["cp"],
                buffers=buffers,
                buffer_seq_dims=[1] * len(buffers),
                no_restore_buffers=set(buffers),
            ):
                yield mine
            return
        size = self.mesh.shape.cp
        if length % size:
            raise ValueError(f"a sequence of {length} tokens for {size} ranks")
        part = slice(self.mesh.cp_index * length // size, (self.mesh.cp_index + 1) * length // size)
        yield {name: tensor[:, part].contiguous() for name, tensor in whole.items()}


def _check_attention(model: PreTrainedModel) -> None:
    """Every token has to attend to all before it: masks of other kinds would be forgotten.

    Raises:
        RequestError: some layers of the model attend otherwise.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        others = ", ".join(sorted(kinds - {"full_attention"})) or "a sliding window"
        raise RequestError(
            f"parallel.context: {type(model).__name__} attends by {others}, which is not known"
        )


class GatherAttention:
    """Attention of this rank's queries to all keys and values."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Queries [batch, heads, length, head size] with keys and values of this rank's tokens."""
        both = _Gather.apply(torch.stack((key, value)), self.group)
        length, rank = query.shape[2], dist.get_rank(self.group)
        key, value = both[:, :, :, : (rank + 1) * length].unbind()  # nothing after its own tokens is seen
        # A mask that flash kernels know by its kind; one of booleans would keep them away.
        mask = causal_lower_right(length, key.shape[2])
        return sdpa_attention_forward(module, query, key, value, mask, **{**options, "is_causal": False})


class UlyssesAttention:
    """Attention of this rank's heads over the whole sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = (_AllToAll.apply(part, self.group, 1, 2) for part in (query, key, value))
        # transformers wants [batch, length, heads, head size] back.
        output, _ = sdpa_attention_forward(module, query, key, value, None, **{**options, "is_causal": True})
        return _AllToAll.apply(output, self.group, 1, 2), None


class _Gather(torch.autograd.Function):
    """All-gather along the tokens; backward sums each rank's part of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[2, batch, heads, length / ranks, head size] to [2, batch, heads, length, head size]."""
        ctx.group = group  # type: ignore[attr-defined]
        size = dist.get_world_size(group)
        parts = mine.new_empty((size * mine.shape[0], *mine.shape[1:]))  # gathered along the first dim
        dist.all_gather_single(parts, mine.contiguous(), group=group)
        return torch.cat(parts.chunk(size), dim=3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        parts = torch.cat(gradient.chunk(size, dim=3))
        mine = parts.new_empty((parts.shape[0] // size, *parts.shape[1:]))
        dist.reduce_scatter_single(mine, parts, group=ctx.group)
        return mine, None


class _AllToAll(torch.autograd.Function):
    """All-to-all: cut dim `cut` over the ranks, put dim `joined` together from them; its own inverse."""

    @staticmethod
    def forward(ctx: FunctionCtx, mine: Tensor, group: dist.ProcessGroup, cut: int, joined: int) -> Tensor:
        ctx.group, ctx.cut, ctx.joined = group, cut, joined  # type: ignore[attr-defined]
        return _exchange(mine, group, cut, joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.group, ctx.joined, ctx.cut), None, None, None


def _exchange(mine: Tensor, group: dist.ProcessGroup, cut: int, joined: int) -> Tensor:
    size = dist.get_world_size(group)
    sent = torch.cat(mine.chunk(size, dim=cut))  # exchanged along the first dim
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.chunk(size), dim=joined)
