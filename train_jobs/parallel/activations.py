"""Activation checkpointing and compilation, block by block, before a strategy shards the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

ops = torch.ops.aten
KEPT = {
    ops.mm.default,
    ops.addmm.default,
    ops.bmm.default,
    ops.convolution.default,
    ops._scaled_dot_product_flash_attention.default,
    ops._scaled_dot_product_flash_attention_for_cpu.default,
    ops._scaled_dot_product_efficient_attention.default,
    ops._scaled_dot_product_cudnn_attention.default,
}
"""Operations whose results `selective` keeps: those that cost most to compute."""


def checkpoint_activations(blocks: Sequence[nn.Module], how: str) -> None:
    """Let backward compute the activations of each block anew (Chen et al., 2016).

    Args:
        how: `full` keeps a block's inputs only; `selective` the results of KEPT too; `none` everything.
    """
    if how == "none":
        return
    contexts: dict[str, Any] = {}
    if how == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        block.forward = _checkpointed(block.forward, contexts)


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block by itself: blocks of one shape share what was compiled."""
    for block in blocks:
        block.compile()


def _checkpointed(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return checkpointed


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
