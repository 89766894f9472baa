"""Calls of tools and reasoning, as OpenAI's own client reads them: streamed and whole are the same."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import openai
import pytest

from tests.serve_apps.stub_gateway import StubGateway
from tests.serve_apps.writing_backend import HERMES, PLAIN, QWEN3, WritingBackend

TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "get_time"}},
]
HI = [{"role": "user", "content": "hi"}]
HIDE = {"extra_body": {"include_reasoning": False}}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "北京 ☀️"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


def asked(backend: WritingBackend, **fields: Any) -> tuple[Any, Any]:
    """The whole answer's choice and the streamed one's, as the client puts that together."""
    gateway = StubGateway()
    gateway.backend = gateway.service.backend = backend

    async def both() -> tuple[Any, Any]:
        async with gateway.client() as http:
            client = openai.AsyncOpenAI(
                api_key="none", base_url="http://gateway/v1", http_client=http, max_retries=0
            )
            body: dict[str, Any] = {
                "model": "chat",
                "messages": HI,
                **fields,
            }
            whole = await client.chat.completions.create(**body)
            async with client.chat.completions.stream(**body) as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_completion()
            return whole.choices[0], final.choices[0]

    return asyncio.run(both())


def told(choice: Any) -> tuple[str | None, str | None, list[tuple[str, Any]], str]:
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert len({call.id for call in message.tool_calls or ()}) == len(calls)
    return message.content or None, getattr(message, "reasoning_content", None), calls, choice.finish_reason


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("Hello.", {}, ("Hello.", None, [], "stop")),
        (
            f"Let me see.\n{PARIS}",
            {},
            ("Let me see.", None, [("get_weather", '{"city": "北京 ☀️"}')], "tool_calls"),
        ),
        (
            f"{PARIS}\n{NOW}",
            {},
            (None, None, [("get_weather", '{"city": "北京 ☀️"}'), ("get_time", "{}")], "tool_calls"),
        ),
        (f"{NOW}\n{PARIS}", {"parallel_tool_calls": False}, (None, None, [("get_time", "{}")], "tool_calls")),
        (PARIS, {"tool_choice": "none"}, (PARIS, None, [], "stop")),
        (
            '{"city": "Paris"}',
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
            (None, None, [("get_weather", '{"city": "Paris"}')], "tool_calls"),
        ),
        (
            '[{"name": "get_time", "parameters": {}}]',
            {"tool_choice": "required"},
            (None, None, [("get_time", "{}")], "tool_calls"),
        ),
    ],
)  # fmt: skip
def test_calls_are_the_same_streamed_and_whole(text: str, fields: dict[str, Any], expected: Any) -> None:
    for seed in range(5):
        backend = WritingBackend(HERMES)
        backend.chance, backend.text = random.Random(seed), text
        whole, streamed = asked(backend, tools=TOOLS, **fields)
        assert told(whole) == told(streamed) == expected


def test_what_follows_the_only_call_is_not_generated() -> None:
    backend = WritingBackend(HERMES)
    backend.text = NOW + " and much more text" * 20
    asked(backend, tools=TOOLS, parallel_tool_calls=False)
    assert len(backend.written) < len(NOW) + 10


def test_an_answer_that_is_cut_off_inside_a_call_says_so() -> None:
    backend = WritingBackend(HERMES)
    backend.text, backend.ends = PARIS[:50], "length"
    gateway = StubGateway()
    gateway.backend = gateway.service.backend = backend

    async def send() -> Any:
        async with gateway.client() as http:
            body = {"model": "chat", "messages": HI, "tools": TOOLS}
            return (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]

    choice = asyncio.run(send())
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert PARIS[:50].endswith(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("text", "prompt_end", "fields", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nHi.", "assistant\n", {}, ("Hi.", "Hm.", [], "stop")),
        ("Hm.\n</think>\n\nHi.", "assistant\n<think>\n", {}, ("Hi.", "Hm.", [], "stop")),
        ("Hi.", "assistant\n<think>\n\n</think>\n\n", {}, ("Hi.", None, [], "stop")),
        ("<think>Hm.</think>Hi.", "assistant\n", HIDE, ("Hi.", None, [], "stop")),
        (
            f"<think>Hm.</think>\n{NOW}",
            "assistant\n",
            {"tools": TOOLS},
            (None, "Hm.", [("get_time", "{}")], "tool_calls"),
        ),
    ],
)  # fmt: skip
def test_reasoning_stands_beside_the_answer(
    text: str, prompt_end: str, fields: dict[str, Any], expected: Any
) -> None:
    backend = WritingBackend(QWEN3)
    backend.text, backend.prompt_end = text, prompt_end
    whole, streamed = asked(backend, **fields)
    assert told(whole) == told(streamed) == expected


def test_tokens_of_the_reasoning_are_counted() -> None:
    backend = WritingBackend(QWEN3)
    backend.text = "<think>" + "thought " * 20 + "</think>Hi."
    gateway = StubGateway()
    gateway.backend = gateway.service.backend = backend

    async def send() -> Any:
        async with gateway.client() as http:
            body = {"model": "chat", "messages": HI}
            return (await http.post("/v1/chat/completions", json=body)).json()["usage"]

    used = asyncio.run(send())
    thought = used["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < thought < used["completion_tokens"]


def test_a_model_whose_calls_cannot_be_read_says_so() -> None:
    backend = WritingBackend(PLAIN)
    backend.text = "Hello."
    with pytest.raises(openai.BadRequestError, match="tools"):
        asked(backend, tools=TOOLS)
    whole, _ = asked(backend, tools=TOOLS, tool_choice="none")
    assert told(whole) == ("Hello.", None, [], "stop")


def test_forced_calls_are_held_to_the_functions_schemas() -> None:
    def schema(**fields: Any) -> Any:
        backend = WritingBackend(HERMES)
        backend.text = "{}"
        asked(backend, **fields)
        return json.loads(backend.requests[0]["sampling"]["json_schema"])

    named = {"type": "function", "function": {"name": "get_weather"}}
    assert schema(tools=TOOLS, tool_choice=named) == {"type": "object"}
    recursive = {
        "$defs": {"t": {"$ref": "#/$defs/t"}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/t"}},
    }
    tools = [*TOOLS, {"type": "function", "function": {"name": "tree", "parameters": recursive}}]
    found = schema(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert found["maxItems"] == found["minItems"] == 1
    calls = {one["properties"]["name"]["const"]: one for one in found["items"]["anyOf"]}
    assert sorted(calls) == ["get_time", "get_weather", "tree"]
    home = calls["tree"]["properties"]["parameters"]["$ref"]
    assert found["$defs"][home.rpartition("/")[2]]["properties"]["a"] == {"$ref": f"{home}/$defs/t"}
