"""The log-probabilities of prompts in the torch engine, whatever schedule, ranks and family of model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GPT2Config, GraniteConfig, OPTConfig, Qwen3MoeConfig

from serve_apps.engine.protocol import AnswerError, Delta, SamplingParams
from serve_apps.engine.torch_engine import head
from tests.serve_apps.engine.conftest import Asker, Reference
from tests.serve_apps.engine.test_architectures import COMMON, SIZES, save
from tests.serve_apps.engine.test_conformance_fields import check_scores, deltas

LONG = [(11 * number) % 319 + 1 for number in range(130)]
FAMILIES = {
    "capped logits": Gemma2Config(**SIZES, **COMMON, sliding_window=6, query_pre_attn_scalar=8),
    "scaled logits": GraniteConfig(**SIZES, **COMMON, logits_scaling=4.0),
    "a decoder in the decoder": OPTConfig(
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        **COMMON,
    ),
    "another name": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256, **COMMON),
    "experts": Qwen3MoeConfig(
        **SIZES,
        **COMMON,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        output_router_logits=True,
    ),
}


def scored(max_tokens: int = 1, top: int = 2) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=top, ignore_eos=True)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "PIECE_NUMBERS", 320 * 7)


def check_all(asker: Asker, reference: Reference, prompts: list[list[int]], max_tokens: int) -> None:
    async def ask() -> list[list[Delta]]:
        others = [asker.answer(prompt, SamplingParams(max_tokens=40, ignore_eos=True)) for prompt in prompts]
        asks = [deltas(asker, prompt, scored(max_tokens)) for prompt in prompts]
        return (await asyncio.gather(*others, *asks))[len(others) :]

    for prompt, gained in zip(prompts, asker.run(ask()), strict=True):
        check_scores(reference, prompt, gained[0], 2)
        tokens = [token for delta in gained for token in delta.token_ids]
        assert tokens == reference.generate(prompt, max_tokens, eos=False)


def test_they_survive_pieces_and_the_loss_of_a_place(
    small_pieces: None, start_engine: Callable[..., Asker], gqa_llama: Path, gqa_reference: Reference
) -> None:
    """Prompts are read in pieces beside answers that take the cache from them, before and after their end."""
    asker = start_engine(
        gqa_llama,
        max_batch=6,
        batched_tokens=24,
        block_size=8,
        context_length=192,
        kv_cache_bytes=24 * 8 * 2 * 2 * 2 * 8 * 4,
    )
    # Of one beginning, so that all but the scored ones find it in the cache.
    check_all(asker, gqa_reference, [LONG, LONG[:70], [5], [*LONG[:50], 9, 8], [7, 8]], 30)
    assert asker.engine.statistics().preempted > 0


def test_they_are_the_same_on_two_ranks(
    start_replica: Callable[..., Any], gqa_llama: Path, gqa_reference: Reference
) -> None:
    asker = start_replica(gqa_llama, max_batch=3, batched_tokens=32).asker
    check_all(asker, gqa_reference, [LONG, [5, 6, 7]], 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_they_are_what_the_whole_model_says_and_not_its_head_alone(
    name: str, start_engine: Callable[..., Asker], llama: Path, tmp_path: Path
) -> None:
    directory = save(FAMILIES[name], llama, tmp_path)
    check_all(start_engine(directory, batched_tokens=24), Reference(directory), [LONG[:50], [5, 6, 7]], 2)


def test_logits_of_a_prompt_are_never_there_all_at_once(
    monkeypatch: pytest.MonkeyPatch, start_engine: Callable[..., Asker], llama: Path
) -> None:
    seen: list[int] = []
    made = torch.Tensor.log_softmax

    def watched(logits: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        seen.append(logits.numel())
        return made(logits, *args, **named)

    monkeypatch.setattr(torch.Tensor, "log_softmax", watched)
    monkeypatch.setattr(head, "PIECE_NUMBERS", 320 * 16)
    asker = start_engine(llama)
    asker.run(deltas(asker, LONG, scored(0)))
    assert len(seen) >= 8
    assert max(seen) <= 320 * 16


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_numbers_that_are_none_end_their_own_request(
    max_tokens: int, start_engine: Callable[..., Asker], llama: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.embed_tokens.weight[17] = float("nan")
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path)
    asker = start_engine(tmp_path)

    async def ask() -> list[Any]:
        asks = [deltas(asker, prompt, scored(max_tokens)) for prompt in ([5, 17, 6], [5, 6])]
        return await asyncio.gather(*asks, return_exceptions=True)

    bad, good = asker.run(ask())
    assert isinstance(bad, AnswerError)
    assert not bad.own_fault
    assert len(good[0].prompt_logprobs) == 1
