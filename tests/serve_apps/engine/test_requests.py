"""What a request may ask for beside plain tokens: penalties, biases, structure, embeddings, priorities."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from serve_apps.engine import structures
from serve_apps.engine.protocol import AnswerError, PromptError, SamplingParams
from tests.serve_apps.engine.conftest import Asker, Reference

PROMPT = [5, 6, 7, 8, 5]
EOS = 0


@pytest.fixture(scope="module")
def asker(start_engine: Callable[..., Any], llama: Path) -> Asker:
    return start_engine(llama, max_batch=4)


def greedy(max_tokens: int = 20, **other: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **other)


def adjusted(reference: Reference, params: SamplingParams) -> list[int]:
    """The greedy answer by the definitions of the penalties, one plain forward pass a token."""
    answer: list[int] = []
    for _ in range(params.max_tokens):
        with torch.no_grad():
            logits = reference.model(torch.tensor([[*PROMPT, *answer]]), use_cache=False).logits[0, -1]
        for token, bias in params.logit_bias:
            logits[token] += bias
        if len(answer) < params.min_tokens:
            logits[EOS] = float("-inf")
        if params.repetition_penalty != 1.0:
            penalty = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
            logits = penalty(torch.tensor([[*PROMPT, *answer]]), logits[None])[0]
        for token, count in Counter(answer).items():
            logits[token] -= count * params.frequency_penalty + params.presence_penalty
        answer.append(int(logits.argmax()))
        if answer[-1] == EOS and not params.ignore_eos:
            break
    return answer


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.4},
        {"logit_bias": ((17, 100.0), (200, -3.0))},
        {"logit_bias": ((EOS, 100.0),), "min_tokens": 7},
    ],
    ids=str,
)
def test_penalties_and_biases_are_those_of_their_definitions(
    options: dict[str, Any], asker: Asker, reference: Reference
) -> None:
    params = greedy(**options)

    async def among_others() -> Any:
        others = [asker.answer([9, 9], greedy(30)), asker.answer([4], SamplingParams(max_tokens=9, seed=1))]
        return (await asyncio.gather(asker.answer(PROMPT, params), *others))[0]

    expected = adjusted(reference, params)
    assert list(asker.run(among_others()).token_ids) == expected
    assert expected != adjusted(reference, greedy()), "the options change nothing here"


def test_log_probabilities_are_those_of_the_model_itself(asker: Asker, reference: Reference) -> None:
    answer = asker.run(asker.answer(PROMPT, greedy(6, logit_bias=((17, 100.0),), logprobs=0)))
    assert set(answer.token_ids) == {17}
    expected = reference.logprobs(PROMPT, answer.token_ids)[:, 17].tolist()
    assert [one.logprob for one in answer.logprobs] == pytest.approx(expected, abs=1e-4)


def test_min_p_leaves_what_is_likely_enough(asker: Asker, reference: Reference) -> None:
    first = reference.logprobs(PROMPT, [1])[0].exp()
    likely = set(torch.nonzero(first >= 0.5 * first.max())[:, 0].tolist())

    async def many() -> set[int]:
        params = [SamplingParams(max_tokens=1, seed=seed, min_p=0.5) for seed in range(40)]
        answers = [(await asker.answer(PROMPT, one)).token_ids[0] for one in params]
        return set(answers)

    assert asker.run(many()) <= likely
    assert len(likely) < 100


def test_a_stop_token_ends_the_answer_like_an_end_of_sequence(asker: Asker, reference: Reference) -> None:
    whole = reference.generate(PROMPT, 20)
    stop = whole[6]
    answer = asker.run(asker.answer(PROMPT, greedy(stop_token_ids=(stop,))))
    assert list(answer.token_ids) == whole[: whole.index(stop) + 1]
    assert answer.finish_reason == "stop"
    assert answer.text == reference.tokenizer.decode(whole[: whole.index(stop)]).rstrip("�")


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}


def test_an_answer_keeps_to_its_schema_whatever_the_model_would_say(asker: Asker) -> None:
    schema = json.dumps(SCHEMA)

    async def ask() -> list[Any]:
        structured = [SamplingParams(max_tokens=200, seed=seed, json_schema=schema) for seed in range(8)]
        plain = [SamplingParams(max_tokens=20, seed=seed) for seed in range(4)]
        return await asyncio.gather(*(asker.answer([5 + i], p) for i, p in enumerate([*structured, *plain])))

    texts = set()
    for answer in asker.run(ask())[:8]:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        texts.add(answer.text)
    assert len(texts) > 1, "the model still chooses"


@pytest.mark.parametrize("schema", ["no json", '{"type": "nothing"}', '{"$ref": "#/nowhere"}', "[]"])
def test_a_schema_that_is_none_is_refused(schema: str, asker: Asker) -> None:
    with pytest.raises(PromptError, match="schema"):
        asker.run(asker.answer(PROMPT, greedy(json_schema=schema)))
    assert len(asker.greedy(PROMPT, 2).token_ids) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"frequency_penalty": 1e30}, "frequency_penalty"),
        ({"temperature": float("inf")}, "temperature"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"logit_bias": ((320, 1.0),)}, "320"),
        ({"stop_token_ids": (-1,)}, "-1"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: dict[str, Any], says: str, asker: Asker) -> None:
    with pytest.raises(PromptError, match=says):
        asker.run(asker.answer(PROMPT, replace(greedy(), **options)))


def test_a_schema_that_would_be_compiled_for_minutes_is_refused(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structures, "COMPILE_S", 1.0)
    patterns = [{"type": "string", "pattern": f".*{number}.*"} for number in range(60)]
    began = time.monotonic()
    with pytest.raises(PromptError, match="not compiled after 1 s"):
        asker.run(asker.answer(PROMPT, greedy(json_schema=json.dumps({"allOf": patterns}))))
    assert time.monotonic() - began < 5
    assert len(asker.greedy(PROMPT, 2).token_ids) == 2


def test_a_schema_that_a_busy_machine_did_not_compile_is_tried_again(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = greedy(json_schema='{"enum": ["busy"]}')
    with monkeypatch.context() as busy:
        busy.setattr(structures, "COMPILE_S", 0.001)
        with pytest.raises(PromptError, match="not compiled"):
            asker.run(asker.answer(PROMPT, params))
    assert asker.run(asker.answer(PROMPT, params)).text == '"busy"'


class PanicException(BaseException):
    """What Rust code raises when it panics, by its name."""


def test_a_library_that_panics_ends_one_answer(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: Any) -> None:
        raise PanicException("index out of range")

    monkeypatch.setattr("llguidance.numpy.fill_next_token_bitmask", panic)

    async def ask() -> list[Any]:
        asks = [asker.answer(PROMPT, greedy(20)), asker.answer(PROMPT, greedy(json_schema="{}"))]
        return await asyncio.gather(*asks, return_exceptions=True)

    plain, failed = asker.run(ask())
    assert isinstance(failed, AnswerError)
    assert plain.token_ids
    monkeypatch.undo()
    assert asker.run(asker.answer(PROMPT, greedy(json_schema='{"enum": [1]}'))).text == "1"


@pytest.mark.parametrize("length", [1, 3, 40, 511])
def test_an_embedding_is_the_mean_of_the_last_hidden_states(
    length: int, start_engine: Callable[..., Any], llama: Path, reference: Reference
) -> None:
    # Read in several steps, beside answers, and after a prompt that begins alike.
    asker = start_engine(llama, max_batch=4, batched_tokens=16, block_size=8)
    prompt = [(7 * index) % 300 + 1 for index in range(length)]

    async def ask() -> Any:
        await asker.answer(prompt[:500], greedy(2))
        return (await asyncio.gather(asker.engine.embed("e", prompt), asker.answer([4], greedy(30))))[0]

    with torch.no_grad():
        output = reference.model(torch.tensor([prompt]), output_hidden_states=True)
    expected = output.hidden_states[-1][0].mean(dim=0).tolist()
    assert asker.run(ask()) == pytest.approx(expected, abs=1e-4)
    assert asker.engine.statistics().cache_use == 0


def test_an_embedding_that_gave_up_its_place_is_still_the_mean(
    start_engine: Callable[..., Any], llama: Path, reference: Reference
) -> None:
    asker = start_engine(llama, max_batch=1, batched_tokens=8)
    prompt = [(7 * index) % 300 + 1 for index in range(300)]

    async def ask() -> list[float]:
        embedding = asyncio.ensure_future(asker.engine.embed("e", prompt))
        await asker.until(lambda: asker.engine.statistics().steps > 3)
        await asker.answer([4], greedy(3, ignore_eos=True), priority=-1)
        return await embedding

    with torch.no_grad():
        output = reference.model(torch.tensor([prompt]), output_hidden_states=True)
    expected = output.hidden_states[-1][0].mean(dim=0).tolist()
    assert asker.run(ask()) == pytest.approx(expected, abs=1e-4)
    assert asker.engine.statistics().preempted == 1


def test_an_embedding_of_too_much_is_refused(asker: Asker) -> None:
    for prompt, says in (([], "empty"), ([1] * 513, "513 tokens"), ([999], "999")):
        with pytest.raises(PromptError, match=says):
            asker.run(asker.engine.embed("e", prompt))


def test_a_request_that_matters_more_goes_first(start_engine: Callable[..., Any], llama: Path) -> None:
    asker = start_engine(llama, max_batch=1)
    order: list[str] = []

    async def ask(name: str, priority: int, tokens: int) -> Any:
        answer = await asker.answer([5], greedy(tokens, ignore_eos=True), priority=priority)
        order.append(name)
        return answer

    async def schedule() -> list[Any]:
        first = asyncio.ensure_future(ask("first", 1, 60))
        await asker.until(lambda: asker.engine.statistics().generated_tokens > 3)
        later = [ask("later", 1, 3), ask("urgent", 0, 3)]
        return await asyncio.gather(first, *later)

    first, later, urgent = asker.run(schedule())
    assert order == ["urgent", "first", "later"]
    assert first.token_ids[:3] == later.token_ids == urgent.token_ids
    assert asker.engine.statistics().preempted == 1


def test_a_long_prompt_does_not_stop_the_answers_of_others(
    start_engine: Callable[..., Any], llama: Path
) -> None:
    asker = start_engine(llama, max_batch=2, batched_tokens=17)

    async def ask() -> int:
        running = asyncio.ensure_future(asker.answer([5], greedy(200, ignore_eos=True)))
        await asker.until(lambda: asker.engine.statistics().generated_tokens > 3)
        before = asker.engine.statistics()
        await asker.answer([6] * 480, greedy(1, ignore_eos=True))
        after = asker.engine.statistics()
        assert after.steps - before.steps >= 480 // 16
        await running
        # One of them is the long prompt's own.
        return after.generated_tokens - before.generated_tokens - (after.steps - before.steps)

    assert asker.run(ask()) in (0, 1)
