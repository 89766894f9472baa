"""What every engine promises, held by each engine that is installed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_apps.engine.engine_table import find_engine
from serve_apps.engine.protocol import EngineConfig, EngineError, PromptError, SamplingParams, WeightsError
from serve_apps.engine.token_pieces import TokenPieces
from tests.gpu import on_a_gpu
from tests.serve_apps.engine.conftest import Asker, Reference, needs_vllm, save_llama

START_S = 300.0
BYTES_A_TOKEN = 2 * 2 * 2 * 64 * 4
"""In the KV cache of `wide`: keys and values, layers, heads, numbers of a head, bytes of a number."""
PROMPT = [5, 6, 7, 8, 5]
PROMPTS = [PROMPT, list(range(20, 60)), [9], list(range(100, 111))]


@pytest.fixture(scope="module")
def reference(wide: Path) -> Reference:
    return Reference(wide)


def start(
    name: str,
    directory: Path,
    kv_cache_bytes: int | None = 64 * 2**20,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Asker:
    # Compiling takes longer than all of these tests.
    own: dict[str, Any] = {"enforce_eager": True, "step_timeout_s": 10.0} if name == "vllm" else {}
    if "pipeline" in options:
        # Without the pass that compiles, vLLM lacks what the stages hand on.
        own["enforce_eager"] = False
    config = EngineConfig(
        str(directory),
        max_batch=4,
        context_length=256,
        kv_cache_bytes=kv_cache_bytes,
        extra=own | dict(extra or {}),
        **options,
    )
    asker = Asker(find_engine(name).load_engine()(config, "127.0.0.1", 0))
    asker.run(asker.engine.start(), START_S)
    return asker


ENGINES = [
    pytest.param(("torch", {"device": "cpu"}), id="torch"),
    pytest.param(("torch", {"device": "cuda"}), id="torch-gpu", marks=on_a_gpu),
    pytest.param(("vllm", {"device": "cpu"}), id="vllm", marks=[needs_vllm, pytest.mark.slow]),
    pytest.param(("vllm", {"device": "cuda"}), id="vllm-gpu", marks=[needs_vllm, *on_a_gpu]),
]


@pytest.fixture(scope="module", params=ENGINES)
def asker(request: pytest.FixtureRequest, wide: Path) -> Iterator[Asker]:
    name, options = request.param
    asker = start(name, wide, **options)
    yield asker
    asker.close()


def greedy(max_tokens: int = 16, **other: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **other)


def check_answers(asker: Asker, reference: Reference) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(asker.answer(prompt, greedy()) for prompt in PROMPTS * 3))

    for prompt, answer in zip(PROMPTS * 3, asker.run(ask()), strict=True):
        expected = reference.generate(prompt, 16)
        assert list(answer.token_ids) == expected
        ends = expected[-1] == 0
        assert answer.finish_reason == ("stop" if ends else "length")
        text = reference.tokenizer.decode(expected, skip_special_tokens=True)
        # Bytes that are no text are written in different ways.
        assert answer.text == text or "�" in text


def test_greedy_answers_are_those_of_generate(asker: Asker, reference: Reference) -> None:
    check_answers(asker, reference)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_answers_of_several_ranks_of_vllm_are_those_of_generate(
    ranks: dict[str, int], wide: Path, reference: Reference
) -> None:
    asker = start("vllm", wide, **ranks)
    try:
        check_answers(asker, reference)
    finally:
        asker.close()


def test_the_first_tokens_come_before_the_last(asker: Asker) -> None:
    async def ask() -> list[int]:
        deltas = asker.engine.generate("one by one", PROMPT, greedy(32, ignore_eos=True))
        return [len(delta.token_ids) async for delta in deltas]

    counts = asker.run(ask())
    assert sum(counts) == 32
    assert len(counts) > 4


def test_a_seed_gives_the_same_answer_alone_and_among_others(asker: Asker) -> None:
    seeded = SamplingParams(max_tokens=20, temperature=1.5, top_p=0.9, seed=11)
    alone = asker.run(asker.answer(PROMPT, seeded))

    async def crowd() -> list[Any]:
        others = [SamplingParams(max_tokens=9), greedy(30), SamplingParams(max_tokens=25, top_k=5)]
        return await asyncio.gather(
            *(asker.answer(PROMPTS[1], o) for o in others), asker.answer(PROMPT, seeded)
        )

    assert asker.run(crowd())[-1].token_ids == alone.token_ids


def test_the_text_ends_before_a_stop_string_and_at_a_stop_token(asker: Asker, reference: Reference) -> None:
    whole = asker.greedy(PROMPTS[1], 60, ignore_eos=True)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    answer = asker.greedy(PROMPTS[1], 60, ignore_eos=True, stop=("never in there", stop))
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert (answer.finish_reason, answer.stop_string) == ("stop", stop)
    token = whole.token_ids[5]
    answer = asker.greedy(PROMPTS[1], 60, ignore_eos=True, stop=("never in there",), stop_token_ids=(token,))
    assert (answer.finish_reason, answer.stop_string) == ("stop", None)
    assert answer.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


def test_logprobs_are_those_of_a_plain_forward_pass(asker: Asker, reference: Reference) -> None:
    answer = asker.run(
        asker.answer(PROMPT, SamplingParams(max_tokens=12, temperature=1.3, seed=4, logprobs=3))
    )
    expected = reference.logprobs(PROMPT, answer.token_ids)
    assert tuple(one.token_id for one in answer.logprobs) == answer.token_ids
    for row, described in zip(expected, answer.logprobs, strict=True):
        values, tokens = row.topk(3)
        assert described.logprob == pytest.approx(row[described.token_id].item(), abs=1e-3)
        likeliest = described.top[:3]
        assert [token for token, _ in likeliest] == tokens.tolist()
        assert [logprob for _, logprob in likeliest] == pytest.approx(values.tolist(), abs=1e-3)
        assert (described.token_id, described.logprob) in described.top
        assert len(described.top) == 3 + (described.token_id not in tokens)


def test_the_pieces_of_its_tokens_are_the_answer(asker: Asker, reference: Reference) -> None:
    piece = TokenPieces(reference.tokenizer).of
    for seed in range(4):
        answer = asker.run(asker.answer(PROMPT, SamplingParams(max_tokens=40, seed=seed, logprobs=0)))
        joined = b"".join(piece(one.token_id)[1] for one in answer.logprobs).decode(errors="replace")
        # Rubbish is told in other numbers of replacement characters by other decoders.
        assert re.sub("\ufffd+", "", joined) == re.sub("\ufffd+", "", answer.text)


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 2.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"logit_bias": ((17, 100.0),), "min_tokens": 3},
    ],
    ids=str,
)
def test_penalties_mean_the_same_to_every_engine(
    options: dict[str, Any], asker: Asker, reference: Reference
) -> None:
    from tests.serve_apps.engine.test_requests import adjusted

    params = greedy(**options)
    assert list(asker.run(asker.answer(PROMPT, params)).token_ids) == adjusted(reference, params)


def test_an_answer_keeps_to_its_schema(asker: Asker) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    for seed in range(3):
        params = SamplingParams(max_tokens=60, seed=seed, json_schema=json.dumps(schema))
        assert json.loads(asker.run(asker.answer(PROMPT, params)).text)["a"] in ("x", "y")


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], greedy(), "empty"),
        ([1] * 250, greedy(7), "257.*at most 256"),
        ([1, 320], greedy(), "320"),
        ([1], greedy(json_schema="no json"), "."),
        ([1], greedy(0), "max_tokens"),
        ([1], greedy(logit_bias=((320, 1.0),)), "320"),
        ([1], greedy(stop_token_ids=(320,), min_tokens=3), "320"),
        ([1], greedy(repetition_penalty=1e-300), "repetition_penalty"),
        ([1], greedy(repetition_penalty=1e300), "repetition_penalty"),
        ([1], greedy(frequency_penalty=float("nan")), "frequency_penalty"),
        ([1], SamplingParams(temperature=float("inf")), "temperature"),
    ],
)
def test_a_bad_request_is_refused_and_the_others_go_on(
    prompt: list[int], params: SamplingParams, says: str, asker: Asker
) -> None:
    async def ask() -> list[Any]:
        asks = [asker.answer(PROMPT, greedy(20, ignore_eos=True)), asker.answer(prompt, params)]
        return await asyncio.gather(*asks, return_exceptions=True)

    good, bad = asker.run(ask())
    assert isinstance(bad, PromptError)
    assert torch.is_tensor(torch.tensor(good.token_ids))
    assert len(good.token_ids) == 20


AT_ONCE = json.dumps({"enum": ["a"]})
"""A schema whose answers are complete after three tokens."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"min_tokens": 50, "json_schema": AT_ONCE}, '"a"'),
        ({"min_tokens": 5, "stop_token_ids": tuple(range(320))}, ""),
        ({"min_tokens": 50, "json_schema": AT_ONCE, "repetition_penalty": 100.0}, '"a"'),
        ({"min_tokens": 50, "json_schema": AT_ONCE, "logit_bias": ((0, -100.0),)}, '"a"'),
        ({"repetition_penalty": 0.01, "logit_bias": ((5, 100.0),), "min_p": 1.0, "top_k": 1}, None),
    ],
    ids=str,
)
def test_what_leaves_few_tokens_or_none_hurts_nobody(
    asked: dict[str, Any], text: str | None, temperature: float, asker: Asker, reference: Reference
) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, **asked)

    async def ask() -> list[Any]:
        others = [asker.answer(prompt, greedy(30, ignore_eos=True)) for prompt in PROMPTS[:2]]
        return await asyncio.gather(asker.answer([5, 6, 7], params), *others)

    answer, *others = asker.run(ask())
    assert (answer.text, answer.finish_reason) == (text, "stop") or text is None
    for prompt, other in zip(PROMPTS, others, strict=False):
        assert list(other.token_ids) == reference.generate(prompt, 30, eos=False)
    asker.engine.check()


def test_only_requests_with_the_same_salt_share_what_is_cached(asker: Asker, reference: Reference) -> None:
    """Two who ask the same are told the same, and no sooner where they have nothing to do with each other."""
    prompt = list(range(60, 260))  # more than a block of any engine

    def found(cache_salt: str, prompt: list[int] = prompt) -> int:
        before = asker.engine.statistics().found_tokens
        answer = asker.run(asker.answer(prompt, greedy(4), cache_salt=cache_salt))
        assert list(answer.token_ids) == reference.generate(prompt, 4)
        return asker.engine.statistics().found_tokens - before

    assert [found(salt) > 0 for salt in ("", "a", "b", "ab")] == [False] * 4
    assert [found(salt) > 64 for salt in ("ab", "b", "a", "")] == [True] * 4
    # What is shared is the beginning, with the salt too.
    assert found("a", [*prompt[:150], 5, 6, 7]) > 64


def test_readers_that_leave_and_requests_that_are_aborted_free_their_places(asker: Asker) -> None:
    endless = greedy(200, ignore_eos=True)

    async def read(request_id: str) -> list[Any]:
        return [delta async for delta in asker.engine.generate(request_id, PROMPT, endless)]

    async def ask() -> tuple[Any, list[Any], int]:
        leaving = await asker.answer(PROMPT, endless, until=lambda answer: len(answer.token_ids) >= 3)
        aborted = asyncio.ensure_future(read("to be aborted"))
        before = asker.engine.statistics().generated_tokens
        await asker.until(lambda: asker.engine.statistics().generated_tokens > before + 3)
        await asker.engine.abort("to be aborted")
        deltas = await aborted
        # A last request, by which the engine has said how many run.
        await asker.answer(PROMPT, greedy(4, ignore_eos=True))
        await asker.until(lambda: asker.engine.statistics().running == 0)
        return leaving, deltas, asker.engine.statistics().waiting

    leaving, deltas, waiting = asker.run(ask())
    assert len(leaving.token_ids) < 200
    assert deltas[-1].finish_reason == "abort"
    assert sum(len(delta.token_ids) for delta in deltas) < 200
    assert waiting == 0


def test_other_weights_come_between_two_answers(
    asker: Asker, wide: Path, reference: Reference, tmp_path: Path
) -> None:
    other = save_llama(
        tmp_path,
        hidden_size=128,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        seed=8,
    )
    changed = Reference(other)

    async def change(to: Path) -> tuple[Any, Any]:
        begun = asyncio.ensure_future(asker.answer(PROMPT, greedy(100, ignore_eos=True)))
        before = asker.engine.statistics().generated_tokens
        await asker.until(lambda: asker.engine.statistics().generated_tokens > before + 3)
        changing = asyncio.ensure_future(asker.engine.load_weights(str(to)))
        await asyncio.sleep(0.01)
        late = asyncio.ensure_future(asker.answer(PROMPT, greedy(20)))
        await changing
        return await begun, await late

    for to, old, new in ((other, reference, changed), (wide, changed, reference)):
        begun, late = asker.run(change(to))
        assert list(begun.token_ids) == old.generate(PROMPT, 100, eos=False)
        assert list(late.token_ids) == new.generate(PROMPT, 20)
    with pytest.raises(WeightsError):
        asker.run(asker.engine.load_weights(str(tmp_path / "nowhere")))
    check_answers(asker, reference)


def test_statistics_tell_what_was_done(asker: Asker) -> None:
    before = asker.engine.statistics()
    prompt = [3 + before.steps % 7, *range(60, 140)]
    for _ in range(2):
        asker.greedy(prompt, 5, ignore_eos=True)
    after = asker.engine.statistics()
    assert after.generated_tokens - before.generated_tokens == 10
    assert after.prompt_tokens - before.prompt_tokens == 162
    assert after.cache_bytes == pytest.approx(64 * 2**20, rel=0.1)
    assert after.cache_tokens == pytest.approx(after.cache_bytes / BYTES_A_TOKEN, rel=0.1)
    assert after.steps > before.steps
    assert 0 <= after.cache_use <= 1


@needs_vllm
@pytest.mark.slow
def test_a_cache_whose_size_is_vllms_choice_is_measured(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    # Its choice may be a part of this machine's memory that is taken.
    extra = {"num_gpu_blocks_override": 10, "gpu_memory_utilization": 0.2}
    asker = start("vllm", wide, kv_cache_bytes=None, extra=extra)
    try:
        found = asker.engine.statistics()
        assert found.cache_tokens == 10 * 128  # on a CPU
        assert found.cache_bytes == found.cache_tokens * BYTES_A_TOKEN
    finally:
        asker.close()


@pytest.mark.parametrize("name", ["torch", pytest.param("vllm", marks=[needs_vllm, pytest.mark.slow])])
def test_a_model_that_cannot_be_run_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        start(name, tmp_path)


def test_an_engine_that_is_not_installed_says_how_to_install_it(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=r"vLLM is not installed.*pip install 'shoal\[vllm\]'"):
        start("vllm", wide)
