"""Every parser of calls and reasoning: what a model wrote comes out, however it was cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.parsing.answer_parser import AnswerParser, Told
from serve_apps.parsing.json_calls import CallList, NamedCall
from serve_apps.parsing.parser_table import TOOL_PARSERS
from serve_apps.parsing.parts import Function, Parser
from serve_apps.parsing.thinking import Thinking
from tests.pace import loops

WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "tags": {"type": "array"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
)
CLOCK = Function("clock.now", {"type": "object", "properties": {}})
FUNCTIONS = (WEATHER, CLOCK)
Call = tuple[str, dict[str, Any]]
CALL: Call = ("clock.now", {})

NASTY = [
    "",
    "Paris",
    "北京 ☀️",
    '"',
    "\\",
    "a\nb",
    "\n",
    "{",
    "}]",
    "</tool_call",
    "[ARGS]",
    "it's (1)",
    "; ",
    "null",
]


def hermes(calls: Sequence[Call]) -> str:
    lines = [json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls]
    return "\n".join(f"<tool_call>\n{line}\n</tool_call>" for line in lines)


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


def llama_tagged(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + llama(calls)


def mistral_list(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in calls], ensure_ascii=False)


def mistral_each(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)


def mistral_ids(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(a)}" for n, a in calls)


def coder(calls: Sequence[Call]) -> str:
    def value(one: Any) -> str:
        return one if isinstance(one, str) else json.dumps(one)

    def call(name: str, arguments: dict[str, Any]) -> str:
        said = "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"

    return "\n".join(call(*one) for one in calls)


def pythonic(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"


WRITERS: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "hermes": ("hermes", hermes),
    "llama3_json": ("llama3_json", llama),
    "llama3_json, tagged": ("llama3_json", llama_tagged),
    "mistral, a list": ("mistral", mistral_list),
    "mistral, each": ("mistral", mistral_each),
    "mistral, with ids": ("mistral", mistral_ids),
    "qwen3_coder": ("qwen3_coder", coder),
    "pythonic": ("pythonic", pythonic),
}


def parser_of(
    calls: Parser | None, *, thinking: Thinking | None = None, parallel: bool = True
) -> AnswerParser:
    numbers = count()
    return AnswerParser(thinking, calls, lambda: f"call_{next(numbers)}", parallel=parallel)


def read(parser: AnswerParser, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """The words, the reasoning, and (name, arguments) of each call."""
    told = [*(parser.feed(piece) for piece in pieces), Told()]
    parser.finish(told[-1])
    return gathered(told)


def gathered(told: Sequence[Told]) -> tuple[str, str, list[tuple[str, str]]]:
    names: dict[int, str] = {}
    ids: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for one in told:
        for number, call_id, name, piece in one.calls:
            if name is not None:
                assert call_id is not None, "a call begins with its id"
                assert number not in names, "a call begins once"
                names[number], ids[number] = name, call_id
            assert number in names, "arguments come after the call's name"
            arguments[number] = arguments.get(number, "") + piece
    assert sorted(names) == list(range(len(names)))
    assert len(set(ids.values())) == len(ids)
    calls = [(names[number], arguments.get(number, "")) for number in sorted(names)]
    return "".join(one.text for one in told), "".join(one.reasoning for one in told), calls


def cut(text: str, seed: int) -> list[str]:
    """A text in pieces, from single characters to the whole; some of them empty."""
    chance, pieces = random.Random(seed), []
    most = chance.choice([1, 2, 5, 20, len(text) + 1])
    while text:
        size = chance.randint(0, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


VALUES = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12),
)
ARGUMENTS = st.fixed_dictionaries(
    {"city": VALUES},
    optional={
        "days": st.integers(-10, 10**12),
        "exact": st.booleans(),
        "where": st.dictionaries(st.sampled_from(["a", "b c"]), st.sampled_from([1, "x}", None, [1.5]])),
        "tags": st.lists(st.sampled_from(["<", ")", 3])),
    },
)
CALLS = st.lists(
    st.one_of(st.tuples(st.just("get_weather"), ARGUMENTS), st.just(("clock.now", {}))),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("style", WRITERS)
@given(calls=CALLS, seed=st.integers(0, 2**32))
def test_calls_come_out_as_they_went_in(style: str, calls: list[Call], seed: int) -> None:
    name, write = WRITERS[style]
    if name == "qwen3_coder":  # a value that holds the format's own marks cannot be written in it
        calls = [(n, {k: v for k, v in a.items() if "</" not in str(v)}) for n, a in calls]
    words, _, found = read(parser_of(TOOL_PARSERS[name](FUNCTIONS)), cut(write(calls), seed))
    assert [(n, json.loads(a)) for n, a in found] == calls
    assert words == ""


@pytest.mark.parametrize("style", [s for s, (name, _) in WRITERS.items() if name in ("hermes", "mistral")])
@given(seed=st.integers(0, 2**32))
def test_words_before_a_call_are_kept_and_the_blanks_between_are_not(style: str, seed: int) -> None:
    name, write = WRITERS[style]
    text = "Let me look.\n\n" + write([("get_weather", {"city": "Paris"})])
    words, _, found = read(parser_of(TOOL_PARSERS[name](FUNCTIONS)), cut(text, seed))
    assert (words, found) == ("Let me look.", [("get_weather", '{"city": "Paris"}')])


PLAIN = [
    "Just words.",
    "  Blanks at both ends \n",
    "An <tool_call is not a mark, nor is [TOOL_CALLS or <function or <|python_tag",
    "{'a': 1}",
    '{"name": "Bob", "age": 3}',
    '{"city": "Paris"}',
    "[1, 2, 3]",
    "[see get_weather(...) there]",
    "[other(a=1)]",
    "<",
    "[",
    "{",
    "",
]


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize("text", PLAIN)
def test_an_answer_without_a_call_is_shown_as_it_is(name: str, text: str) -> None:
    for seed in range(30):
        words, _, found = read(parser_of(TOOL_PARSERS[name](FUNCTIONS)), cut(text, seed))
        assert (words, found) == (text, [])


BROKEN = {
    "hermes": [
        "<tool_call>\nnot JSON\n</tool_call>",
        "<tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
    ],
    "llama3_json": [
        '{"name": "get_weath',
        '{"nam',
        '{"name": 3, "parameters": {}}',
        "<|python_tag|>print(1)",
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]get_wea", "[TOOL_CALLS] so they say"],
    "qwen3_coder": ["<tool_call>\nwords", "<function=get_wea"],
    "pythonic": ["[get_weather(city=", "[get_weather(city=f(1))]", "[get_weather(1)]", "[get_weather"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_what_only_begins_like_a_call_is_not_lost(name: str, text: str) -> None:
    results = {str(read(parser_of(TOOL_PARSERS[name](FUNCTIONS)), cut(text, seed))) for seed in range(30)}
    assert len(results) == 1
    words, _, found = read(parser_of(TOOL_PARSERS[name](FUNCTIONS)), [text])
    assert found == []
    core = text.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
    assert core in words


@pytest.mark.parametrize("style", WRITERS)
@given(calls=CALLS, seed=st.integers(0, 2**32), part=st.floats(0, 1))
def test_an_answer_that_is_cut_off_has_the_calls_so_far(
    style: str, calls: list[Call], seed: int, part: float
) -> None:
    name, write = WRITERS[style]
    if name == "qwen3_coder":
        calls = [(n, {k: v for k, v in a.items() if "</" not in str(v)}) for n, a in calls]
    whole = write(calls)
    text = whole[: int(len(whole) * part)]
    _, _, found = read(parser_of(TOOL_PARSERS[name](FUNCTIONS)), cut(text, seed))
    assert [n for n, _ in found] == [n for n, _ in calls][: len(found)]
    for (_, arguments), (_, full) in zip(found[:-1], calls, strict=False):
        assert json.loads(arguments) == full


MARKS = ["<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>", "</function>", "<think>"]
MARKS += [
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "get_weather",
    "[",
    "]",
    "(",
    ")",
    "{",
    "}",
    '"',
]
MARKS += ["name", ":", ",", "arguments", "\\", " ", "\n", "x", ">", "clock.now", "=", "1", "é", ";"]


@pytest.mark.parametrize("name", TOOL_PARSERS)
@given(words=st.lists(st.sampled_from(MARKS), max_size=40), seed=st.integers(0, 2**32), open=st.booleans())
def test_the_same_comes_out_however_nonsense_is_cut(
    name: str, words: list[str], seed: int, open: bool
) -> None:
    def parser() -> AnswerParser:
        return parser_of(TOOL_PARSERS[name](FUNCTIONS), thinking=Thinking(open=open))

    text = "".join(words)
    assert read(parser(), cut(text, seed)) == read(parser(), [text])


@pytest.mark.parametrize(
    ("text", "open", "reasoning", "words"),
    [
        ("<think>\nFirst.\n\nThen.\n</think>\n\nThe answer.\n", False, "First.\n\nThen.", "The answer.\n"),
        ("First.\n</think>The answer.", True, "First.", "The answer."),
        ("<think>First.</think>The answer.", True, "First.", "The answer."),
        ("\n\nThe answer.", False, "", "\n\nThe answer."),
        ("<think>\n\n</think>\n\nThe answer.", False, "", "The answer."),
        ("Never done", True, "Never done", ""),
        ("<think>Never done </thin", False, "Never done </thin", ""),
        ("<thi", False, "", "<thi"),
        ("A <think>b</think> c", False, "", "A <think>b</think> c"),
    ],
)
def test_reasoning_stands_apart(text: str, open: bool, reasoning: str, words: str) -> None:
    for seed in range(50):
        parser = parser_of(None, thinking=Thinking(open=open))
        assert read(parser, cut(text, seed)) == (words, reasoning, [])


def test_calls_follow_reasoning() -> None:
    text = "<think>\nWhere <tool_call> may be said.\n</think>\n\n" + hermes([("clock.now", {})])
    for seed in range(50):
        parser = parser_of(TOOL_PARSERS["hermes"](FUNCTIONS), thinking=Thinking(open=False))
        assert read(parser, cut(text, seed)) == ("", "Where <tool_call> may be said.", [("clock.now", "{}")])


def test_words_after_a_call_are_told_apart_however_the_text_is_cut() -> None:
    text = f"One.{hermes([CALL])} Two.{hermes([CALL])} Three."
    for seed in range(30):
        parser = parser_of(TOOL_PARSERS["hermes"](FUNCTIONS))
        before = after = ""
        for piece in [*cut(text, seed), None]:
            if piece is None:
                parser.finish(told := Told())
            else:
                told = parser.feed(piece)
            early = len(told.text) - told.text_after_calls
            before, after = before + told.text[:early], after + told.text[early:]
        assert (before, after) == ("One.", " Two. Three.")


def test_a_request_for_one_call_is_complete_with_the_first() -> None:
    text = hermes([("clock.now", {}), ("clock.now", {})]) + "and words"
    for seed in range(30):
        parser = parser_of(TOOL_PARSERS["hermes"](FUNCTIONS), parallel=False)
        assert read(parser, cut(text, seed)) == ("", "", [("clock.now", "{}")])
        assert parser.complete


@given(calls=CALLS, seed=st.integers(0, 2**32))
def test_calls_that_a_request_asks_for_come_as_a_list(calls: list[Call], seed: int) -> None:
    text = json.dumps([{"name": n, "parameters": a} for n, a in calls])
    _, _, found = read(parser_of(CallList()), cut(text, seed))
    assert [(n, json.loads(a)) for n, a in found] == calls


def test_one_function_that_a_request_names_gets_all_of_the_answer() -> None:
    parser = parser_of(NamedCall("get_weather"))
    assert read(parser, ['{"city', '": "Paris"}']) == ("", "", [("get_weather", '{"city": "Paris"}')])


@pytest.mark.parametrize(("text", "arguments"), [
    ('{"arguments": {"city": "Paris"}, "name": "get_weather"}', '{"city": "Paris"}'),
    ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', '{"city": "Paris"}'),
    ('{"name": "get_weather", "arguments": null}', "{}"),
    ('{"name": "get_weather"}', "{}"),
    ('{"type": "function", "name": "get_weather", "arguments":{ "city" : "a" } }', '{ "city" : "a" }'),
])  # fmt: skip
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_objects_of_weak_models_are_calls_too(name: str, text: str, arguments: str) -> None:
    frames = {"hermes": "<tool_call>\n{}\n</tool_call>", "llama3_json": "{}", "mistral": "[TOOL_CALLS][{}]"}
    for seed in range(30):
        pieces = cut(frames[name].replace("{}", text, 1), seed)
        assert read(parser_of(TOOL_PARSERS[name](FUNCTIONS)), pieces) == (
            "",
            "",
            [("get_weather", arguments)],
        )


def test_long_arguments_cost_what_they_must() -> None:
    """Twice as long takes about twice as long, a character at a time."""

    def cost(size: int) -> float:
        text = hermes([("get_weather", {"city": "a\\n" * size})])

        def parse() -> None:
            parser = parser_of(TOOL_PARSERS["hermes"](FUNCTIONS))
            for char in text:
                parser.feed(char)

        return loops(parse)

    assert cost(20_000) < 4 * cost(10_000)
