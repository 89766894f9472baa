"""What an answer's parsers need of the engine: marks that are shown, room beside a structure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_apps.engine.protocol import SamplingParams
from serve_apps.openai.errors import ApiError
from serve_apps.parsing.parser_table import TOOL_PARSERS
from serve_apps.replica.item_maker import ItemMaker
from serve_apps.replica.items import items
from serve_apps.replica.prompts import Prompts
from serve_apps.replica.reading import AnswerReading
from serve_apps.tokens.inbox import Item, merge
from tests.serve_apps.engine.conftest import Asker, start_engine
from tests.serve_apps.tiny_model import make_model

__all__ = ["start_engine"]  # a fixture

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
FUNCTION = {"name": "get_weather", "parameters": {"type": "object"}}
AUTO = {"functions": [FUNCTION], "mode": "auto", "name": None, "parallel": True}
ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
SCHEMA = json.dumps(ONE)
PLAIN: dict[str, Any] = {"temperature": 0.0}


def model(directory: Path, *, special: bool) -> Path:
    """The tiny model, its tokenizer with marks as tokens of their own."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    path = make_model(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in MARKS])
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("marks"), special=True)


@pytest.fixture(scope="module")
def asker(start_engine: Callable[..., Any], path: Path) -> Asker:
    asker: Asker = start_engine(path, max_batch=4)
    return asker


@pytest.fixture(scope="module")
def prompts(path: Path) -> Prompts:
    return Prompts(str(path))


def reading(prompts: Prompts, tools: str = "hermes", reasoning: str = "qwen3") -> AnswerReading:
    return AnswerReading("", tools, reasoning, prompts.token_of, prompts.special_tokens)


def answer(
    asker: Asker, prompts: Prompts, read: AnswerReading, prompt: str, asked: dict[str, Any], **sampling: Any
) -> Item:
    """The whole answer, whose likeliest tokens are those that `says` names, in their order."""
    parser = read.parser(asked, prompt, all_tokens=False)
    params = SamplingParams(**read.sampling(asked, prompt, {**PLAIN, "max_tokens": 40, **sampling}))
    ids = prompts.encode({"prompt": prompt})

    async def ask() -> Item:
        deltas = asker.engine.generate(f"r{id(parser)}", ids, params)
        return merge([item async for item in items(deltas, plainly(prompts, ids), parser)])

    return asker.run(ask())


def plainly(prompts: Prompts, ids: list[int]) -> ItemMaker:
    return ItemMaker(prompts, {"sampling": {}}, ids, whole=True)


def bias(prompts: Prompts, *marks: str) -> tuple[tuple[int, float], ...]:
    return tuple((token, 100.0) for mark in marks if (token := prompts.token_of(mark)) is not None)


def test_marks_that_are_special_tokens_are_read_and_other_special_tokens_are_not_shown(
    prompts: Prompts,
) -> None:
    read = reading(prompts)
    assert read.sampling({}, "", PLAIN) == {**PLAIN, "skip_special_tokens": False}
    parser = read.parser({}, "<think>", all_tokens=False)
    assert parser is not None
    told = [parser.feed(text) for text in ("Hm", "<|end|>", "</think>", "Hi.", "<|end|>")]
    assert ("".join(one.text for one in told), "".join(one.reasoning for one in told)) == ("Hi.", "Hm")


def test_a_structure_holds_behind_the_reasoning(asker: Asker, prompts: Prompts) -> None:
    ends = bias(prompts, "</think>")
    for prompt in ("x<think>", "x"):
        starts = [(token, 50.0) for token, _ in bias(prompts, "<think>")]
        found = answer(
            asker, prompts, reading(prompts), prompt, {}, json_schema=SCHEMA, logit_bias=(*starts, *ends)
        )
        assert json.loads(found["text"]) == {"a": 1}
        assert found["finish_reason"] == "stop"


def test_reasoning_that_does_not_end_is_cut_by_its_length_and_never_by_the_end_of_sequence(
    asker: Asker, prompts: Prompts
) -> None:
    never = tuple((token, -100.0) for token in (prompts.token_of("</think>"),) if token is not None)
    found = answer(
        asker, prompts, reading(prompts), "x<think>", {}, json_schema=SCHEMA, logit_bias=((0, 100.0), *never)
    )
    assert (found["text"], found["finish_reason"]) == ("", "length")


def test_a_call_may_come_in_place_of_a_structure(asker: Asker, prompts: Prompts) -> None:
    read = reading(prompts, reasoning="none")
    unlikely = tuple((token, -100.0) for token, _ in bias(prompts, "<tool_call>"))
    free = answer(asker, prompts, read, "x", AUTO, json_schema=SCHEMA, logit_bias=unlikely)
    assert json.loads(free["text"]) == {"a": 1}
    called = answer(
        asker, prompts, read, "x", AUTO, json_schema=SCHEMA, logit_bias=bias(prompts, "<tool_call>")
    )
    # It goes on as it likes; weights that are random write no call, and what they write is not lost.
    assert called["text"].startswith("<tool_call>")
    assert called["finish_reason"] == "length"


@pytest.mark.parametrize("tools", sorted(TOOL_PARSERS))
def test_where_no_token_says_that_a_call_begins_its_text_does(tools: str) -> None:
    from llguidance import LLMatcher, LLTokenizer

    from serve_apps.engine.structures import compiled

    read = AnswerReading("", tools, "none")
    said = read.sampling(AUTO, "", {"json_schema": SCHEMA})
    ((kind, form),) = said.items()
    begins = {
        "hermes": '<tool_call>\n{"name": "get_weather"',
        "qwen3_coder": "<tool_call>\n<function=get_weather>",
        "mistral": "[TOOL_CALLS][",
        "llama3_json": '{"name":"get_weather","parameters":{"city":"x/y"}}',
        "pythonic": "[get_weather(city='a')]",
    }
    for text, may in ((begins[tools], True), ('{"a":1}', True), ("words", False), ('{"a":2}', False)):
        matcher = LLMatcher(LLTokenizer("byte"), compiled(kind, form).grammar, log_level=0)
        assert matcher.consume_tokens(list(text.encode())) is may, text


def test_a_structure_that_leaves_no_room_for_calls_is_refused() -> None:
    with pytest.raises(ApiError, match="leaves no room"):
        AnswerReading("", "pythonic", "none").sampling(AUTO, "", {"regex": "a+"})


def test_forced_calls_are_whole_calls(asker: Asker, prompts: Prompts) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    asked = {**AUTO, "mode": "named", "name": "get_weather"}
    schema["additionalProperties"] = False
    found = answer(
        asker, prompts, reading(prompts, reasoning="none"), "x", asked, json_schema=json.dumps(schema)
    )
    assert found["finish_reason"] == "tool_calls"
    arguments = "".join(piece for _, _, _, piece in found["calls"])
    assert found["calls"][0][2] == "get_weather"
    assert json.loads(arguments)["n"] in (1, 2)


def test_readings_run_beside_one_another(asker: Asker, prompts: Prompts) -> None:
    read = reading(prompts)

    async def one(number: int) -> Item:
        asked: dict[str, Any] = {}
        parser = read.parser(asked, "<think>", all_tokens=False)
        params = SamplingParams(
            **read.sampling(asked, "<think>", {"max_tokens": 30, "seed": number, "json_schema": SCHEMA})
        )
        ids = prompts.encode({"prompt": f"{number}<think>"})
        return merge(
            [
                item
                async for item in items(
                    asker.engine.generate(f"n{number}", ids, params), plainly(prompts, ids), parser
                )
            ]
        )

    async def all_of() -> list[Item]:
        return await asyncio.gather(*(one(number) for number in range(8)))

    for item in asker.run(all_of()):
        if item["finish_reason"] == "stop":
            assert json.loads(item["text"]) == {"a": 1}
