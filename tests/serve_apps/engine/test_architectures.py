"""Models of several families, small ones of random weights, against transformers' own `generate`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    ViTConfig,
)

from serve_apps.engine.protocol import EngineConfig, EngineError, SamplingParams
from serve_apps.engine.torch_engine.model import eos_ids, read_facts
from tests.gpu import on_a_gpu
from tests.serve_apps.engine.conftest import Asker, Reference

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
FAMILIES = {
    "llama": LlamaConfig(**SIZES, **COMMON),
    "qwen2": Qwen2Config(**SIZES, **COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, **COMMON, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, **COMMON, sliding_window=6),
}
"""Those that have a tensor-parallel plan."""
OTHERS = {
    "learned positions": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **COMMON),
    "sliding window in every other layer": Qwen3Config(
        **SIZES,
        **COMMON,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "capped scores": Gemma2Config(
        **SIZES, **COMMON, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=3.0
    ),
}


def save(config: PreTrainedConfig, tokenizer_of: Path, directory: Path) -> Path:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_answers_in_a_mixed_batch_are_those_of_generate(
    name: str, device: str, start_engine: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    directory = save((FAMILIES | OTHERS)[name], llama, tmp_path)
    asker = start_engine(directory, batched_tokens=24, device=device, kv_cache_bytes=64 * 2**20)
    reference = Reference(directory)
    prompts = [[5, 6, 7], list(range(20, 60)), [9], list(range(100, 111))]
    params = SamplingParams(max_tokens=16, temperature=0.0)

    async def ask() -> list[Any]:
        return await asyncio.gather(*(asker.answer(prompt, params) for prompt in prompts))

    for prompt, answer in zip(prompts, asker.run(ask()), strict=True):
        assert list(answer.token_ids) == reference.generate(prompt, 16)


MOST_TOKENS = 24
CONTEXT = 64


class Schedules:
    """Requests of one family in random orders, with what `generate` answers to each."""

    def __init__(self, reference: Reference) -> None:
        chance = random.Random(5)
        beginnings = [[chance.randrange(1, 320) for _ in range(length)] for length in (8, 17, 30)]
        self._prompts = []
        for _ in range(40):
            beginning = chance.choice(beginnings)[: chance.choice([0, 4, 8, 30])]
            own = [chance.randrange(1, 320) for _ in range(chance.randint(1, 10))]
            self._prompts.append(beginning + own)
        self._answers = [reference.generate(prompt, MOST_TOKENS) for prompt in self._prompts]

    async def run(self, asker: Asker, seed: int) -> None:
        """One schedule: every request must get its own tokens, also one whose reader leaves early."""
        chance = random.Random(seed)
        seen = 0

        async def ask(number: int, joins_after: int) -> None:
            nonlocal seen
            await asker.until(lambda: seen >= joins_after or not running)
            most, leaves = chance.randint(1, MOST_TOKENS), chance.random() < 0.15
            kept = chance.randint(1, most)

            def count(answer: Any) -> bool:
                nonlocal seen
                seen += 1
                return leaves and len(answer.token_ids) >= kept

            sampling = SamplingParams(max_tokens=most, temperature=0.0)
            running.add(number)
            try:
                answer = await asker.answer(
                    self._prompts[number], sampling, count, priority=chance.choice([0, 0, 0, 1])
                )
            finally:
                running.discard(number)
            expected = self._answers[number][:most]
            if leaves:
                expected = expected[: len(answer.token_ids)]
            assert list(answer.token_ids) == expected, (seed, number)

        running: set[int] = set()
        numbers = [chance.randrange(len(self._prompts)) for _ in range(chance.randint(2, 9))]
        await asyncio.gather(*(ask(number, chance.randint(0, 40)) for number in numbers))


def tight(config: PreTrainedConfig, tensor: int) -> dict[str, Any]:
    """A cache that holds one and a half sequences of full length, and steps of few tokens."""
    token_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim // tensor
    return {
        "context_length": CONTEXT,
        "max_batch": 4,
        "batched_tokens": 16,
        "block_size": 4,
        "kv_cache_bytes": token_bytes * CONTEXT * 3 // 2,
    }


def run_schedules(asker: Asker, family: Path, caching: bool, count: int) -> None:
    schedules = Schedules(Reference(family))
    for seed in range(count):
        asker.run(schedules.run(asker, seed))
    statistics = asker.engine.statistics()
    assert statistics.cache_use == statistics.running == statistics.waiting == 0
    assert statistics.preempted > 0
    assert (statistics.found_tokens > 0) == caching


CACHING = [True, pytest.param(False, marks=pytest.mark.slow)]


@pytest.mark.parametrize("caching", CACHING, ids=["prefixes", "no prefixes"])
@pytest.mark.parametrize(
    ("name", "count"),
    [("llama", 6), *(pytest.param(name, 64, marks=pytest.mark.slow) for name in FAMILIES)],
)
def test_any_schedule_gives_the_tokens_of_generate(
    name: str, count: int, caching: bool, start_engine: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    directory = save(FAMILIES[name], llama, tmp_path)
    asker = start_engine(directory, prefix_caching=caching, **tight(FAMILIES[name], 1))
    run_schedules(asker, directory, caching, count)


@pytest.mark.parametrize("caching", CACHING, ids=["prefixes", "no prefixes"])
@pytest.mark.parametrize(
    ("name", "count"),
    [("qwen3", 2), *(pytest.param(name, 16, marks=pytest.mark.slow) for name in FAMILIES)],
)
def test_any_schedule_of_two_ranks_gives_the_tokens_of_generate(
    name: str, count: int, caching: bool, start_replica: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    directory = save(FAMILIES[name], llama, tmp_path)
    replica = start_replica(directory, prefix_caching=caching, **tight(FAMILIES[name], 2))
    run_schedules(replica.asker, directory, caching, count)


def test_layers_that_are_not_attention_are_refused(
    start_engine: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    config.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="linear_attention"):
        start_engine(tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (BloomConfig(vocab_size=320, hidden_size=32, n_layer=1, n_head=4), "attention of its own"),
        (FalconConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=4), "own"),
        (
            FalconConfig(vocab_size=320, num_hidden_layers=1, hidden_size=32, alibi=True),
            "attention of its own",
        ),
        (MptConfig(vocab_size=320, d_model=32, n_heads=4, n_layers=1), "attention of its own"),
        (T5Config(vocab_size=320, d_model=32, num_layers=1), "encoders with decoders"),
        (BertConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1), "both directions"),
        (ViTConfig(hidden_size=32, num_hidden_layers=1), "generates no text"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_a_family_that_this_engine_cannot_run_is_refused_by_name(
    config: PreTrainedConfig, says: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=f"family {config.model_type}, .*{says}"):
        read_facts(EngineConfig(str(tmp_path)), str(tmp_path))


def longrope(length: int) -> Phi3Config:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    return Phi3Config(
        **{**SIZES, "max_position_embeddings": 128},
        **COMMON,
        rope_scaling=scaling,
        original_max_position_embeddings=length,
    )


def test_a_token_means_the_same_whatever_else_is_in_the_batch(
    start_engine: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    """Phi-3 and Phi-4 take other factors for a whole batch once one of it is long."""
    directory = save(longrope(48), llama, tmp_path)
    with pytest.raises(EngineError, match=r"context_length is 100, but .* takes 48 in the torch engine"):
        read_facts(EngineConfig(str(directory), context_length=100), str(directory))
    asker, reference = start_engine(directory, batched_tokens=24), Reference(directory)
    assert asker.engine.context_length == 48
    prompts = [[5, 6, 7], list(range(20, 50)), list(range(100, 111))]
    params = SamplingParams(max_tokens=16, temperature=0.0)

    async def ask() -> list[Any]:
        return await asyncio.gather(*(asker.answer(prompt, params) for prompt in prompts))

    for prompt, answer in zip(prompts, asker.run(ask()), strict=True):
        assert list(answer.token_ids) == reference.generate(prompt, 16)


def test_an_answer_ends_where_the_model_or_its_tokenizer_says() -> None:
    def model(named: int | list[int] | None, of_config: int | None = 7) -> Any:
        text = SimpleNamespace(eos_token_id=of_config)
        config = SimpleNamespace(get_text_config=lambda decoder: text)
        return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=named), config=config)

    def tokenizer(eos: int | None) -> Any:
        return SimpleNamespace(eos_token_id=eos)

    assert eos_ids(model(1), tokenizer(2)) == {1, 2}
    assert eos_ids(model([1, 3]), tokenizer(3)) == {1, 3}
    assert eos_ids(model(None), tokenizer(2)) == {7, 2}
    assert eos_ids(model(0), tokenizer(0)) == {0}
    assert eos_ids(model(None, None), tokenizer(None)) == frozenset()
