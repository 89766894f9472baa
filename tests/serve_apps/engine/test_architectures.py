"""Models other than Llama, small ones of random weights, against transformers' own `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from serve_apps.engine.protocol import EngineError, SamplingParams

COMMON = {"vocab_size": 320, "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": 0}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MODELS = {
    "learned positions": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **COMMON),
    "normalised queries, tied": Qwen3Config(**SIZES, **COMMON, tie_word_embeddings=True),
    "sliding window in all layers": MistralConfig(**SIZES, **COMMON, sliding_window=6),
    "sliding window in every other layer": Qwen3Config(
        **SIZES,
        **COMMON,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}


def save(config: PreTrainedConfig, tokenizer_of: Path, directory: Path) -> Path:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", MODELS)
def test_answers_in_a_mixed_batch_are_those_of_generate(
    name: str, start_engine: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    directory = save(MODELS[name], llama, tmp_path)
    asker = start_engine(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    prompts = [[5, 6, 7], list(range(20, 60)), [9], list(range(100, 111))]
    params = SamplingParams(max_tokens=16, temperature=0.0)

    async def ask() -> list[Any]:
        return await asyncio.gather(*(asker.answer(prompt, params) for prompt in prompts))

    for prompt, answer in zip(prompts, asker.run(ask()), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, pad_token_id=0
        )
        assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()


def test_layers_that_are_not_attention_are_refused(
    start_engine: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    config.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="linear_attention"):
        start_engine(tmp_path)
