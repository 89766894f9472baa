"""What our parsers make of whole answers is what vLLM's parsers of the same names make of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from serve_apps.parsing.parser_table import TOOL_PARSERS
from tests.serve_apps.parsing.test_parsers import FUNCTIONS, WRITERS, Call, parser_of, read
from tests.serve_apps.tiny_model import make_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed"),
]

ANSWERS: list[list[Call]] = [
    [("get_weather", {"city": "Paris"})],
    [("get_weather", {"city": "北京 ☀️", "days": 3, "exact": True})],
    [("get_weather", {"city": 'a "b" \\ {c}'}), ("get_weather", {"city": "", "where": {"a": [1, None]}})],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    path: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(sorted({mark for parser in TOOL_PARSERS.values() for mark in parser.MARKS}))
    return tokenizer


# vLLM takes lists by Mistral's older tokenizers alone, and passes over ids.
STYLES = [style for style in WRITERS if style not in ("mistral, a list", "mistral, with ids")]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("calls", ANSWERS)
def test_calls_are_those_of_vllm(style: str, calls: list[Call], tokenizer: Any) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    name, write = WRITERS[style]
    tools = [
        {"type": "function", "function": {"name": one.name, "parameters": dict(one.parameters)}}
        for one in FUNCTIONS
    ]
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "hi"}], tools=tools, tool_choice="auto"
    )
    theirs = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    told = theirs.extract_tool_calls(write(calls), request)
    assert told.tools_called
    expected = [(call.function.name, json.loads(call.function.arguments)) for call in told.tool_calls]
    _, _, found = read(parser_of(TOOL_PARSERS[name](FUNCTIONS)), [write(calls)])
    assert [(name, json.loads(arguments)) for name, arguments in found] == expected == calls
