"""Every family of decoders that transformers has: it answers as `generate`, or it is refused with a sentence.

`pytest -m slow tests/serve_apps/engine/test_all_families.py` goes over all of them; a few are always tried.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serve_apps.engine.protocol import EngineConfig, EngineError, SamplingParams
from serve_apps.engine.torch_engine.engine import TorchEngine
from serve_apps.engine.torch_engine.model import read_facts
from tests.serve_apps.engine.conftest import Asker, Reference
from tests.serve_apps.engine.tiny_families import FAMILIES, NOT_TINY, save, tiny

NAMES = """
    afmoe apertus apertus1p5_text arcee aria_text axk1 beam bert bert-generation bitnet camembert codegen
    cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3
    dots1 electra ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint fuyu gemma gemma2
    gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite
    got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2
    jetmoe kolibri1 laguna lfm2 lfm2_moe llama longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2
    ministral ministral3 mistral mixtral modernbert-decoder moss_transcribe_diarize nanochat nemotron olmo
    olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal qwen2 qwen2_moe qwen3 qwen3_moe roberta
    roberta-prelayernorm roc_bert sarvam_mla sarvam_moe seed_oss smollm3 solar_open starcoder2 vaultgemma
    xlm-roberta xlm-roberta-xl xmod youtu
"""
ANSWERED = frozenset(NAMES.split())
"""Those that this engine runs: none of them may come to be refused unnoticed."""
QUICK = ["deepseek_v3", "diffllama", "doge", "dory", "gemma4_text", "gpt_oss", "hrm_text", "moshi", "phimoe"]
"""Each of another kind: of heads, of layers, or of what is refused."""
PROMPTS = [[5, 6, 7], list(range(20, 60)), [9], list(range(100, 111))]
"""The longest is read in two pieces, and is longer than any window."""
OPTIONS: dict[str, Any] = {
    "batched_tokens": 24,
    "context_length": 64,
    "max_batch": 8,
    "kv_cache_bytes": 4 * 2**20,
}


def start(directory: Path, **options: Any) -> Asker | str:
    """An engine with this model, or why it refuses the model."""
    asker = Asker(TorchEngine(EngineConfig(str(directory), **OPTIONS | options)))
    try:
        asker.run(asker.engine.start())
    except EngineError as error:
        return str(error)
    return asker


def answers(asker: Asker) -> list[list[int]]:
    """Of all prompts, one after another, and then all at once."""
    params = SamplingParams(max_tokens=16, temperature=0.0)

    async def ask() -> list[Any]:
        alone = [await asker.answer(prompt, params) for prompt in PROMPTS]
        together = await asyncio.gather(*(asker.answer(prompt, params) for prompt in PROMPTS))
        return alone + list(together)

    return [list(answer.token_ids) for answer in asker.run(ask())]


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILIES
        if family not in NOT_TINY
    ],
)
def test_a_family_answers_as_generate_or_is_refused(family: str, llama: Path, tmp_path: Path) -> None:
    config = tiny(family)
    config.save_pretrained(tmp_path)
    try:
        read_facts(EngineConfig(str(tmp_path), context_length=OPTIONS["context_length"]), str(tmp_path))
    except EngineError:
        # Before its weights are read, so that there need not be any.
        assert family not in ANSWERED
        return
    save(config, llama, tmp_path)
    asker = start(tmp_path)
    if isinstance(asker, str):
        assert family not in ANSWERED, asker
        # Of a model of several parts it is the part that writes text.
        assert asker.startswith(f"{tmp_path} is of the family {config.model_type}")
        return
    try:
        reference = Reference(tmp_path)
        expected = [reference.generate(prompt, 16) for prompt in PROMPTS]
        assert answers(asker) == expected * 2
    finally:
        asker.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(ANSWERED))
def test_rounding_lets_no_family_be_refused(family: str, llama: Path, tmp_path: Path) -> None:
    """The engine compares what it computes twice, in other places: in bf16 that is not the same."""
    asker = start(save(tiny(family), llama, tmp_path), precision="bf16")
    assert isinstance(asker, Asker), asker
    asker.close()


def test_what_is_named_here_is_there() -> None:
    assert set(FAMILIES) >= {*ANSWERED, *QUICK, *NOT_TINY}
