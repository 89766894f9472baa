"""Attention of a rank's queries to the keys of all: what it comes to, and the kind of mask it is told by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import scaled_dot_product_attention

from train_jobs.parallel import context

RANKS, LENGTH = 4, 8


@pytest.mark.parametrize("rank", range(RANKS))
def test_it_is_that_of_the_whole_sequence_without_a_mask_of_booleans(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = torch.randn(3, 2, 4, RANKS * LENGTH, 16, generator=torch.Generator().manual_seed(1))
    masks: list[Any] = []
    attend = context.sdpa_attention_forward

    def attended(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        masks.append(mask)
        assert key.shape[2] == (rank + 1) * LENGTH, "keys that none of its tokens sees are left out"
        return attend(module, query, key, value, mask, **options)

    monkeypatch.setattr(context, "sdpa_attention_forward", attended)
    monkeypatch.setattr(context._Gather, "apply", lambda mine, group: torch.stack((key, value)))
    monkeypatch.setattr(context.dist, "get_rank", lambda group: rank)
    part = slice(rank * LENGTH, (rank + 1) * LENGTH)
    module = SimpleNamespace(num_key_value_groups=1)
    mine = (each[:, :, part] for each in (query, key, value))
    output, _ = context.GatherAttention(None)(module, *mine, None)  # type: ignore[arg-type]
    expected = scaled_dot_product_attention(query, key, value, is_causal=True)[:, :, part]
    assert torch.allclose(output.transpose(1, 2), expected, atol=1e-6)
    # Flash kernels take no other mask (torch.nn.attention.bias).
    assert [type(mask) for mask in masks] == [CausalBias]
