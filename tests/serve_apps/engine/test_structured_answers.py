"""Answers that keep to a JSON schema where that is hard: what outgrows its grammar, what none can hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_apps.engine.protocol import AnswerError, PromptError, SamplingParams
from serve_apps.engine.structure_compiler import without_format
from serve_apps.engine.torch_engine.structure import Structures
from tests.serve_apps.engine.conftest import Asker
from tests.serve_apps.tiny_model import make_tokenizer

PROMPT = [5, 6, 7, 8, 5]


@pytest.fixture(scope="module")
def asker(start_engine: Callable[..., Any], llama: Path) -> Asker:
    return start_engine(llama, max_batch=4)


def greedy(**other: Any) -> SamplingParams:
    return SamplingParams(max_tokens=20, temperature=0.0, **other)


DEEP = {"$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(500)}},
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {**DEEP, "$ref": "#/$defs/a"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
    ids=["500 optional properties", "itself", "itself by name", "objects without end", "arrays without end"],
)
def test_an_answer_that_outgrows_its_schema_never_ends_as_if_it_were_whole(
    schema: dict[str, Any], asker: Asker
) -> None:
    """A parser that gives up lets nothing but the end come, which is no whole answer."""

    async def ask() -> list[Any]:
        params = [
            SamplingParams(max_tokens=250, temperature=2.0, seed=seed, json_schema=json.dumps(schema))
            for seed in range(4)
        ]
        return await asyncio.gather(*(asker.answer([5], one) for one in params), return_exceptions=True)

    for answer in asker.run(ask()):
        if isinstance(answer, AnswerError):
            assert answer.own_fault
        elif isinstance(answer, Exception):
            assert isinstance(answer, PromptError)
        elif answer.finish_reason == "stop":
            json.loads(answer.text)
    assert len(asker.greedy(PROMPT, 2).token_ids) == 2


def test_a_format_that_nobody_knows_holds_an_answer_to_nothing(asker: Asker) -> None:
    schema = {
        "type": "object",
        "properties": {
            "format": {"enum": ["a"], "format": "color"},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["format", "day"],
        "additionalProperties": False,
        "format": "nonsense",
    }
    answer = asker.run(asker.answer(PROMPT, SamplingParams(max_tokens=200, json_schema=json.dumps(schema))))
    found = json.loads(answer.text)
    assert found["format"] == "a", "a property of that name is none"
    date.fromisoformat(found["day"])
    assert without_format({"enum": [{"format": "x"}], "a": [{"format": "x"}]}, "x") == {
        "enum": [{"format": "x"}],
        "a": [{}],
    }


@pytest.mark.parametrize(
    "keyword", ["uniqueItems", "contains", "propertyNames", "dependentRequired", "oneOf"]
)
def test_what_no_grammar_can_hold_is_refused_by_name(keyword: str, asker: Asker) -> None:
    value = {"uniqueItems": True, "oneOf": [{"type": "integer"}, {"type": "number"}]}.get(keyword, {})
    kind = "object" if keyword in ("propertyNames", "dependentRequired") else "array"
    schema = {keyword: value} if keyword == "oneOf" else {"type": kind, keyword: value}
    with pytest.raises(PromptError, match=keyword):
        asker.run(asker.answer(PROMPT, greedy(json_schema=json.dumps(schema))))


@pytest.mark.parametrize("extra", [-30, 0, 30])
def test_a_tokenizer_may_be_longer_or_shorter_than_the_models_vocabulary(tmp_path: Path, extra: int) -> None:
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    size = len(tokenizer) + extra
    structure = Structures(tokenizer, size, frozenset({0})).make(greedy(json_schema='{"enum": [true]}'))
    assert structure is not None
    text = ""
    for _ in range(4):
        logits = torch.zeros(size)
        structure.mask(logits)
        (token,) = logits.isfinite().nonzero()[:, 0].tolist()
        structure.take(token)
        text += tokenizer.decode([token])
    assert text == "true"
