"""Whole answers of one rank, against transformers' own `generate`."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from serve_apps.engine.protocol import Delta, EngineError, PromptError, QueueFullError, SamplingParams

PROMPTS = [
    " the quick brown fox",
    "你好，世界",
    "def",
    "import torch\nimport numpy",
    "😀",
    " a potion of the end",
]


def greedy(max_tokens: int, **other: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **other)


@pytest.fixture(scope="module")
def asker(start_engine: Callable[..., Any], llama: Path) -> Any:
    return start_engine(llama, max_batch=4)


@pytest.fixture(scope="module")
def gqa_asker(start_engine: Callable[..., Any], gqa_llama: Path) -> Any:
    # Narrow steps, so that long prompts are read in several.
    return start_engine(gqa_llama, max_batch=3, batched_tokens=24, block_size=8)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_answers_are_those_of_generate(asker: Any, reference: Any, prompt: str) -> None:
    ids = reference.tokenizer.encode(prompt)
    answer = asker.greedy(ids, 24)
    assert list(answer.token_ids) == reference.generate(ids, 24)
    assert answer.finish_reason == "length"


@settings(
    max_examples=30,
    deadline=None,
    # To make a failing example smaller takes minutes with a model behind it.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(1, 300), min_size=1, max_size=40),
            st.integers(1, 24),
            st.integers(0, 6),
        ),
        min_size=1,
        max_size=9,
    )
)
def test_answers_in_a_mixed_batch_are_those_of_each_prompt_alone(
    gqa_asker: Any, gqa_reference: Any, requests: list[tuple[list[int], int, int]]
) -> None:
    """Prompts and answers of any lengths, each joining when so many tokens of the first are there."""

    async def ask() -> list[Any]:
        seen = 0

        def count(answer: Any) -> bool:
            nonlocal seen
            seen = len(answer.token_ids)
            return False

        async def join(prompt: list[int], max_tokens: int, after: int) -> Any:
            await gqa_asker.until(lambda: first.done() or seen >= after)
            return await gqa_asker.answer(prompt, greedy(max_tokens))

        prompt, max_tokens, _ = requests[0]
        first = asyncio.ensure_future(gqa_asker.answer(prompt, greedy(max_tokens), count))
        return await asyncio.gather(first, *(join(*request) for request in requests[1:]))

    for (prompt, max_tokens, _), answer in zip(requests, gqa_asker.run(ask()), strict=True):
        assert list(answer.token_ids) == gqa_reference.generate(prompt, max_tokens)


def test_a_cache_that_grows_keeps_what_it_holds(asker: Any, reference: Any) -> None:
    ids = reference.tokenizer.encode(PROMPTS[0])
    answer = asker.greedy(ids, 300, ignore_eos=True)
    assert list(answer.token_ids) == reference.generate(ids, 300, eos=False)


def test_the_end_of_sequence_ends_the_answer_and_is_not_in_its_text(
    start_engine: Callable[..., Any], llama: Path, reference: Any, tmp_path: Path
) -> None:
    ids = reference.tokenizer.encode(PROMPTS[0])
    long = reference.generate(ids, 24)
    end = long[7]
    directory = shutil.copytree(llama, tmp_path / "model")
    generation = json.loads((directory / "generation_config.json").read_text())
    # A list, as many models have; its last one comes first in this answer.
    generation["eos_token_id"] = [0, 319, end]
    (directory / "generation_config.json").write_text(json.dumps(generation))
    asker = start_engine(directory)
    expected = long[: long.index(end) + 1]
    answer = asker.greedy(ids, 24)
    assert list(answer.token_ids) == expected
    assert answer.finish_reason == "stop"
    assert answer.text == reference.tokenizer.decode(expected[:-1]).rstrip("�")
    onwards = asker.greedy(ids, 24, ignore_eos=True)
    assert list(onwards.token_ids) == long
    assert onwards.finish_reason == "length"


def test_the_pieces_of_text_are_the_text(asker: Any, reference: Any) -> None:
    ids = reference.tokenizer.encode(PROMPTS[1])
    answer = asker.greedy(ids, 60)
    # Half a character at the end is dropped, one that is none is not.
    assert answer.text.rstrip("�") == reference.tokenizer.decode(answer.token_ids).rstrip("�")


def test_the_text_ends_before_a_stop_string(asker: Any, reference: Any) -> None:
    ids = reference.tokenizer.encode(PROMPTS[0])
    whole = asker.greedy(ids, 60)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    answer = asker.greedy(ids, 60, stop=("never in there", stop))
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert len(answer.token_ids) < len(whole.token_ids)
    # What was held back because it could have become a stop string comes in the end.
    held = asker.greedy(ids, 60, stop=(whole.text[-2:] + "x",))
    assert held.text == whole.text
    assert asker.engine.statistics().running == 0


def test_a_seed_gives_the_same_answer_alone_and_among_others(asker: Any, reference: Any) -> None:
    ids = reference.tokenizer.encode(PROMPTS[0])
    seeded = SamplingParams(max_tokens=20, temperature=1.5, top_p=0.9, seed=11)
    alone = asker.run(asker.answer(ids, seeded))

    async def crowd() -> list[Any]:
        others = [SamplingParams(max_tokens=9), greedy(30), SamplingParams(max_tokens=25, top_k=5)]
        asks = [asker.answer(reference.tokenizer.encode(PROMPTS[2]), other) for other in others]
        return await asyncio.gather(*asks, asker.answer(ids, seeded))

    assert asker.run(crowd())[-1].token_ids == alone.token_ids
    other = asker.run(asker.answer(ids, SamplingParams(max_tokens=20, temperature=1.5, top_p=0.9, seed=12)))
    assert other.token_ids != alone.token_ids


def test_logprobs_are_those_of_a_plain_forward_pass(asker: Any, reference: Any) -> None:
    ids = reference.tokenizer.encode(PROMPTS[0])
    params = SamplingParams(max_tokens=12, temperature=1.3, seed=4, logprobs=3)

    async def ask() -> Any:
        # Among others, and only this one reports.
        other = asker.answer(reference.tokenizer.encode(PROMPTS[1]), greedy(12))
        return (await asyncio.gather(other, asker.answer(ids, params)))[1]

    answer = asker.run(ask())
    expected = reference.logprobs(ids, answer.token_ids)
    assert len(answer.logprobs) == len(answer.token_ids) == 12
    for row, described in zip(expected, answer.logprobs, strict=True):
        values, tokens = row.topk(3)
        assert described.logprob == pytest.approx(row[described.token_id].item(), abs=1e-4)
        likeliest = described.top[:3]
        assert [token for token, _ in likeliest] == tokens.tolist()
        assert [logprob for _, logprob in likeliest] == pytest.approx(values.tolist(), abs=1e-4)
        assert (described.token_id, described.logprob) in described.top
        assert len(described.top) == 3 + (described.token_id not in tokens)
    assert tuple(described.token_id for described in answer.logprobs) == answer.token_ids
    assert asker.run(asker.answer(ids, SamplingParams(max_tokens=2))).logprobs == ()


def test_a_reader_that_leaves_frees_its_place(start_engine: Callable[..., Any], llama: Path) -> None:
    asker = start_engine(llama, max_batch=1)

    async def ask() -> Any:
        endless = greedy(400, ignore_eos=True)
        leaving = await asker.answer([5, 6], endless, until=lambda answer: len(answer.token_ids) >= 3)
        cancelled = asyncio.ensure_future(asker.answer([7], endless))
        await asker.until(lambda: asker.engine.statistics().running == 1)
        waiting = asyncio.ensure_future(asker.answer([8], greedy(3, ignore_eos=True)))
        await asker.until(lambda: asker.engine.statistics().waiting == 1)
        cancelled.cancel()
        last = await waiting
        assert cancelled.cancelled()
        return leaving, last

    leaving, last = asker.run(ask())
    assert len(leaving.token_ids) < 400
    assert len(last.token_ids) == 3
    statistics = asker.engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.cache_use) == (0, 0, 0)
    assert statistics.generated_tokens < 400


def test_abort_ends_an_answer_that_runs_and_one_that_waits(
    start_engine: Callable[..., Any], llama: Path
) -> None:
    asker = start_engine(llama, max_batch=1)

    async def read(deltas: AsyncIterator[Delta]) -> list[Delta]:
        return [delta async for delta in deltas]

    async def ask() -> tuple[list[Delta], list[Delta]]:
        endless = greedy(400, ignore_eos=True)
        runs = asyncio.ensure_future(read(asker.engine.generate("runs", [5], endless)))
        await asker.until(lambda: asker.engine.statistics().running == 1)
        waits = asyncio.ensure_future(read(asker.engine.generate("waits", [5], endless)))
        await asker.until(lambda: asker.engine.statistics().waiting == 1)
        await asker.engine.abort("nobody")
        await asker.engine.abort("waits")
        await asker.engine.abort("runs")
        return await runs, await waits

    ran, waited = asker.run(ask())
    assert [delta.finish_reason for delta in ran][-1] == "abort"
    assert [delta.finish_reason for delta in waited] == ["abort"]
    assert asker.engine.statistics().running == 0


def test_more_than_may_wait_are_refused_and_the_others_answered(
    start_engine: Callable[..., Any], llama: Path
) -> None:
    asker = start_engine(llama, max_batch=2, max_waiting=3)

    async def ask() -> list[Any]:
        asks = [asker.answer([5 + index], greedy(8, ignore_eos=True)) for index in range(9)]
        return await asyncio.gather(*asks, return_exceptions=True)

    results = asker.run(ask())
    refused = [result for result in results if isinstance(result, QueueFullError)]
    answered = [result for result in results if not isinstance(result, Exception)]
    assert len(answered) >= 5
    assert len(refused) >= 1
    assert len(refused) + len(answered) == 9
    assert all(len(answer.token_ids) == 8 for answer in answered)


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], SamplingParams(), "empty"),
        ([1] * 500, SamplingParams(max_tokens=13), "500 tokens.*13 more.*513.*at most 512"),
        ([1, 320, 2], SamplingParams(), "320.*0 to 319"),
        ([1, -1], SamplingParams(), "-1"),
        ([1], SamplingParams(max_tokens=0), "max_tokens"),
        ([1], SamplingParams(temperature=-1.0), "temperature"),
        ([1], SamplingParams(temperature=float("nan")), "temperature"),
        ([1], SamplingParams(top_p=0.0), "top_p"),
        ([1], SamplingParams(top_k=-1), "top_k"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(
    asker: Any, prompt: list[int], params: SamplingParams, says: str
) -> None:
    with pytest.raises(PromptError, match=says):
        asker.run(asker.answer(prompt, params))
    assert len(asker.greedy([1], 2).token_ids) >= 1


def test_the_longest_request_fits(asker: Any, reference: Any) -> None:
    prompt = [(7 * index) % 300 + 1 for index in range(505)]
    answer = asker.greedy(prompt, 7, ignore_eos=True)
    assert list(answer.token_ids) == reference.generate(prompt, 7, eos=False)


def test_a_step_that_fails_ends_every_request_and_the_engine_says_so(
    start_engine: Callable[..., Any], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker = start_engine(llama)
    monkeypatch.setattr(torch.Tensor, "max", _fail)

    async def ask() -> list[Any]:
        return await asyncio.gather(*(asker.answer([5], greedy(4)) for _ in range(3)), return_exceptions=True)

    assert all(isinstance(result, EngineError) for result in asker.run(ask()))
    monkeypatch.undo()
    with pytest.raises(
        EngineError, match=r"a step failed in .*test_generation.py, line \d+: .*no memory left"
    ):
        asker.engine.check()
    with pytest.raises(EngineError):
        asker.greedy([5], 4)


def _fail(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("no memory left")


def test_stop_ends_what_runs(llama: Path, start_engine: Callable[..., Any]) -> None:
    asker = start_engine(llama)

    async def ask() -> Any:
        running = asyncio.ensure_future(asker.answer([5], greedy(400, ignore_eos=True)))
        await asker.until(lambda: asker.engine.statistics().running == 1)
        await asker.engine.stop()
        return await running

    assert asker.run(ask()).finish_reason == "abort"
    with pytest.raises(EngineError, match="not running"):
        asker.greedy([5], 4)


def test_half_precision_runs(start_engine: Callable[..., Any], gqa_llama: Path) -> None:
    asker = start_engine(gqa_llama, precision="bf16")

    async def ask() -> list[Any]:
        asks = [asker.answer([5] * length, greedy(8, ignore_eos=True, logprobs=2)) for length in (1, 4, 9)]
        return await asyncio.gather(*asks)

    assert [len(answer.token_ids) for answer in asker.run(ask())] == [8, 8, 8]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"context_length": 4096}, "4096.*512"),
        ({"tensor": 3}, "master_addr"),
        ({"extra": {"prefil_tokens": 1}}, "prefil_tokens"),
    ],
)
def test_a_config_that_the_model_cannot_follow_is_refused(
    start_engine: Callable[..., Any], llama: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineError, match=says):
        start_engine(llama, **options)


def test_a_directory_without_a_model_is_refused(start_engine: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no model"):
        start_engine(tmp_path)


def test_a_step_lasts_as_long_as_it_is_to_and_answers_the_same(
    start_engine: Callable[..., Any], llama: Path, reference: Any
) -> None:
    asker = start_engine(llama, extra={"least_step_ms": 50.0})
    asker.greedy([3, 4], 2)  # what only the first one pays
    began = time.monotonic()
    assert list(asker.greedy([3, 4, 5], 11).token_ids) == reference.generate([3, 4, 5], 11)
    assert 0.5 <= time.monotonic() - began < 1.5
