"""What a model may do that the engine cannot: it is found by running the model, and said in a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

from serve_apps.engine.protocol import EngineConfig, EngineError
from serve_apps.engine.torch_engine import attention
from serve_apps.engine.torch_engine.attention import Batch, paged_attention
from serve_apps.engine.torch_engine.first_passes import try_model
from serve_apps.engine.torch_engine.kv_cache import KvCache, LayerShape
from serve_apps.engine.torch_engine.model import load_model

CPU = torch.device("cpu")


@pytest.fixture
def model(gqa_llama: Path) -> Any:
    return load_model(EngineConfig(str(gqa_llama)), str(gqa_llama), CPU)


def tried(model: Any, context: int = 64) -> dict[int, LayerShape]:
    @torch.inference_mode()
    def forward(ids: torch.Tensor, positions: torch.Tensor, picked: list[int]) -> torch.Tensor:
        output = model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False)
        logits: torch.Tensor = output.logits[0, picked]
        return logits

    return try_model(model, "m", forward, model.config.vocab_size, context)


@pytest.mark.parametrize("context", [1, 5, 64, 512])
def test_a_model_that_keeps_to_attention_tells_its_shapes_and_is_left_as_it_was(
    context: int, model: Any
) -> None:
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    assert tried(model, context) == {0: LayerShape(2, 8, 8), 1: LayerShape(2, 8, 8)}
    assert model.config._attn_implementation == attention.NAME
    assert names == {name: set(vars(module)) for name, module in model.named_modules()}


def two_calls(model: Any) -> None:
    model.model.layers[1].self_attn.layer_idx = 0


def no_number(model: Any) -> None:
    del model.model.layers[1].self_attn.layer_idx


def both_directions(model: Any) -> None:
    model.config.is_causal = False


def after_attention(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def do(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        mlp.register_forward_pre_hook(lambda module, inputs: (change(inputs[0]),))

    return do


def places_in_the_batch(model: Any) -> None:
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def counted(self: Any, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(hidden, torch.arange(hidden.shape[1])[None])

    rotary.forward = MethodType(counted, rotary)


def told(**more: Any) -> Callable[[Any], None]:
    """Attention that is called with something more, or something else."""

    def do(model: Any) -> None:
        layer = model.model.layers[1].self_attn
        layer.register_forward_pre_hook(
            lambda module, inputs, keywords: (inputs, keywords | more), with_kwargs=True
        )

    return do


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (two_calls, "calls attention more than once in one layer (0)"),
        (no_number, "attention says of no layer which one it is"),
        (both_directions, "hides tokens by a rule of its own (layer 0)"),
        (told(attention_mask=torch.zeros(1, 1, 16, 16)), "hides tokens by a rule of its own (layer 1)"),
        (told(attention_mask=None, is_causal=False), "hides tokens by a rule of its own (layer 1)"),
        (told(sliding_window=9), "hides tokens by a rule of its own (layer 1)"),
        (told(position_bias=torch.zeros(1, 4, 16, 16)), "attention takes position_bias"),
        (told(indices=None), "attention takes indices"),
        (after_attention(lambda hidden: hidden + hidden.roll(1, dims=1)), "beside attention (the head)"),
        (after_attention(lambda hidden: hidden.cumsum(dim=1)), "beside attention (the head)"),
        (places_in_the_batch, "beside attention (layer 0)"),
    ],
)
def test_what_the_engine_cannot_compute_is_refused(
    change: Callable[[Any], None], says: str, model: Any
) -> None:
    change(model)
    with pytest.raises(EngineError, match=r"^m is of the family llama, .*" + re.escape(says)):
        tried(model)


@pytest.mark.parametrize(("context", "refused"), [(40, False), (64, True)])
def test_a_window_is_found_in_the_rule_of_a_mask_however_long_it_is(
    context: int, refused: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    make = modeling_llama.create_causal_mask

    def windowed(**said: Any) -> Any:
        return make(**said, and_mask_function=lambda batch, head, query, key: key > query - 40)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed)
    if refused:
        with pytest.raises(EngineError, match="hides tokens by a rule of its own"):
            tried(model, context)
    else:
        tried(model, context)


def test_what_attention_is_told_is_never_left_out() -> None:
    """Should a model say something to attention that its first passes did not, it gets no tokens at all."""
    module: Any = torch.nn.Module()
    module.layer_idx = 0
    shape = LayerShape(1, 4, 4)
    Batch(KvCache({0: shape}, 1, 8, torch.float32, CPU), slots=torch.tensor([0])).bind(module)
    states = torch.zeros(1, 1, 1, 4)
    for mask, more in ((torch.zeros(1, 1, 1, 1), {}), (None, {"position_bias": states})):
        with pytest.raises(EngineError, match="layer 0 asks attention for what"):
            paged_attention(module, states, states, states, mask, **more)
