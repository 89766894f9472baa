"""/v1/messages as Anthropic's own client reads it: streamed and whole are the same."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from serve_apps.openai.errors import ApiError
from tests.serve_apps.stub_gateway import StubGateway
from tests.serve_apps.writing_backend import HERMES, QWEN3, WritingBackend, gateway_of

TOOLS: Any = [
    {"name": "get_weather", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
    {"name": "get_time", "description": "The time.", "input_schema": {"type": "object"}, "type": "custom"},
]
HI = [{"role": "user", "content": "hi"}]
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "北京 ☀️"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
CITY = {"city": "北京 ☀️"}


def post(gateway: StubGateway, body: dict[str, Any], path: str = "/v1/messages") -> Any:
    """The answer's document."""

    async def send() -> Any:
        async with gateway.client() as http:
            first: dict[str, Any] = {"model": "chat", "messages": HI}
            if path == "/v1/messages":
                first["max_tokens"] = 30
            return (await http.post(path, json={**first, **body})).json()

    return asyncio.run(send())


def stream(gateway: StubGateway, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; each is named by its type."""

    async def send() -> str:
        async with gateway.client() as http:
            first = {"model": "chat", "messages": HI, "max_tokens": 30, "stream": True}
            answer = await http.post("/v1/messages", json={**first, **body})
            assert answer.headers["content-type"].startswith("text/event-stream")
            return answer.text

    events = []
    for text in asyncio.run(send()).split("\n\n")[:-1]:
        name, _, data = text.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def replayed(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from the events."""
    first, *rest, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = first["message"]
    open_index, written = None, ""
    for event in rest:
        if event["type"] == "content_block_start":
            assert open_index is None, "one block after the other"
            open_index = event["index"]
            assert open_index == len(message["content"])
            message["content"].append(event["content_block"])
            written = ""
            continue
        assert event["index"] == open_index
        block = message["content"][open_index]
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads(written)
            open_index = None
        elif event["delta"]["type"] == "input_json_delta":
            written += event["delta"]["partial_json"]
        else:
            kind = event["delta"]["type"].removesuffix("_delta")
            block[kind] += event["delta"][kind]
    assert open_index is None
    return {**message, **delta["delta"], "usage": delta["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def told(message: dict[str, Any]) -> list[Any]:
    """Kind and content of each block."""
    names = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(block["type"], block[names[block["type"]]]) for block in message["content"]]


CASES: list[Any] = [
    ("Hello.", {}, "end_turn", [("text", "Hello.")]),
    ("", {}, "end_turn", [("text", "")]),
    ("<think>Hm.\n鱼</think>\n\nHi.", {}, "end_turn", [("thinking", "Hm.\n鱼"), ("text", "Hi.")]),
    (
        "<think>Hm.</think>Hi.",
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        "end_turn",
        [("text", "Hi.")],
    ),
    (
        f"<think>Hm.</think>Let me see.\n{PARIS}\n{NOW}",
        {"tools": TOOLS},
        "tool_use",
        [("thinking", "Hm."), ("text", "Let me see."), ("tool_use", CITY), ("tool_use", {})],
    ),
    (
        f"One.{NOW} Two.{PARIS} Three.",
        {"tools": TOOLS},
        "tool_use",
        [("text", "One."), ("tool_use", {}), ("tool_use", CITY), ("text", " Two. Three.")],
    ),
    (
        f"{NOW}{PARIS}",
        {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_use",
        [("tool_use", {})],
    ),
    (
        '{"city": "Paris"}',
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "get_weather"}},
        "tool_use",
        [("tool_use", {"city": "Paris"})],
    ),
    (
        '[{"name": "get_time", "parameters": {}}]',
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        "tool_use",
        [("tool_use", {})],
    ),
    (PARIS, {"tools": TOOLS, "tool_choice": {"type": "none"}}, "end_turn", [("text", PARIS)]),
]


@pytest.mark.parametrize(("text", "fields", "reason", "expected"), CASES)
@pytest.mark.parametrize("ends", ["stop", "length"])
def test_an_answer_is_the_same_streamed_and_whole(
    text: str, fields: dict[str, Any], reason: str, expected: Any, ends: Any
) -> None:
    for seed in range(3):
        backend = WritingBackend(QWEN3)
        backend.text, backend.ends = text, ends
        gateway = gateway_of(backend)
        backend.chance = random.Random(seed)
        whole = post(gateway, fields)
        backend.chance = random.Random(seed)
        streamed = replayed(stream(gateway, fields))
        assert without_ids(streamed) == without_ids(whole)
        assert told(whole) == expected
        cut_off = ends == "length" and "disable_parallel_tool_use" not in json.dumps(fields)
        assert whole["stop_reason"] == ("max_tokens" if cut_off else reason)


def test_anthropics_client_reads_both() -> None:
    anthropic = pytest.importorskip("anthropic")
    httpx2 = pytest.importorskip("httpx2")
    backend = WritingBackend(QWEN3)
    backend.text = f"<think>Hm.</think>Let me see.\n{PARIS}"
    gateway = gateway_of(backend)

    async def both() -> tuple[Any, Any, Any]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(gateway.api)) as http:
            client = anthropic.AsyncAnthropic(
                api_key="none", base_url="http://gateway", http_client=http, max_retries=0
            )
            body: dict[str, Any] = {"model": "chat", "max_tokens": 30, "messages": HI, "tools": TOOLS}
            whole = await client.messages.create(**body)
            async with client.messages.stream(**body) as events:
                async for _ in events:
                    pass
                streamed = await events.get_final_message()
            handed_back = {"role": "assistant", "content": whole.content}
            result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "sunny"}
            body["messages"] = [*HI, handed_back, {"role": "user", "content": [result]}]
            await client.messages.create(**body)
            counted = await client.messages.count_tokens(model="chat", messages=HI)
            with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                await client.messages.create(**{**body, "model": "other"})
            return whole, streamed, counted

    whole, streamed, counted = asyncio.run(both())
    for answer in (whole, streamed):
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert (answer.content[0].thinking, answer.content[1].text) == ("Hm.", "Let me see.")
        assert (answer.content[2].name, answer.content[2].input) == ("get_weather", CITY)
        assert (answer.stop_reason, answer.usage.input_tokens) == ("tool_use", 5)
        assert answer.usage.output_tokens > 0
    assert counted.input_tokens == 1
    turn = backend.requests[2]["messages"][1]
    assert (turn["content"], turn["reasoning_content"]) == ("Let me see.", "Hm.")
    assert turn["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": CITY}
    assert backend.requests[2]["messages"][2] == {
        "role": "tool",
        "content": "sunny",
        "tool_call_id": whole.content[2].id,
    }


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"city": "Par', {}),
        ('{"city": "Paris", "unit": "c', {"city": "Paris"}),
        ('{"days": [1, 2', {"days": [1, 2]}),
        ('{"a": 1e999}', {}),
        ("no JSON", {}),
        ("", {}),
    ],
)
def test_of_arguments_that_are_no_whole_json_is_told_what_can_be_read(written: str, read: Any) -> None:
    backend = WritingBackend(HERMES)
    backend.text, backend.ends = written, "length"
    fields = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "get_weather"}}
    gateway = gateway_of(backend)
    whole = post(gateway, fields)
    assert [block.get("input") for block in whole["content"] if block["type"] == "tool_use"] in ([read], [])
    backend.chance = random.Random(1)
    assert without_ids(replayed(stream(gateway, fields))) == without_ids(whole)


def test_the_stop_sequence_that_ended_an_answer_is_told() -> None:
    backend = WritingBackend(HERMES)
    backend.text, backend.stop_string = "One, two", ", three"
    gateway = gateway_of(backend)
    fields = {"stop_sequences": ["X", ", three"]}
    whole = post(gateway, fields)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", ", three")
    streamed = replayed(stream(gateway, fields))
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == ("stop_sequence", ", three")
    assert backend.requests[0]["sampling"]["stop"] == ("X", ", three")
    backend.text = NOW
    called = post(gateway, {**fields, "tools": TOOLS})
    assert (called["stop_reason"], called["stop_sequence"]) == ("tool_use", None)


def test_blocks_become_turns() -> None:
    backend = WritingBackend(HERMES)
    body = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "system", "content": "Later."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "t1", "name": "get_time", "input": {}},
                    {"type": "tool_use", "id": "t2", "name": "get_weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "8:00"}],
                    },
                    {"type": "text", "text": "and?"},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no such", "is_error": True},
                ],
            },
            {"role": "assistant", "content": "It is "},
        ],
    }
    assert post(gateway_of(backend), body)["type"] == "message"
    (request,) = backend.requests
    time_call = {"name": "get_time", "arguments": {}}
    weather_call = {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert request["messages"] == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "a\n\nb\n\nLater."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": time_call},
                {"id": "t2", "type": "function", "function": weather_call},
            ],
        },
        {"role": "tool", "content": "8:00", "tool_call_id": "t1"},
        {"role": "tool", "content": "Error: no such", "tool_call_id": "t2"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "It is "},
    ]
    # The client has begun the answer.
    assert request["template"]["continue_final_message"] is True


def test_what_is_asked_reaches_the_replica() -> None:
    backend = WritingBackend(QWEN3)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": schema}},
    }
    post(gateway_of(backend), body)
    (request,) = backend.requests
    sampling = request["sampling"]
    assert request["max_tokens"] == 7
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.5, 0.25, 3)
    assert json.loads(sampling["json_schema"]) == schema
    assert request["template"]["arguments"] == {"reasoning_effort": "high", "enable_thinking": False}


CLAUDE_CODE = {
    "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Available agent types: none"},
    ],
    "tools": TOOLS,
    "metadata": {"user_id": "{}"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
"""As claude-code 2.1.197 asks without any settings but the address and the model."""


def test_what_claude_code_sends_is_taken() -> None:
    backend = WritingBackend(HERMES)
    body = {**CLAUDE_CODE, "max_tokens": 32}
    assert post(gateway_of(backend), body, "/v1/messages?beta=true")["type"] == "message"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "'max_tokens' is required"),
        ({"max_tokens": 10**6}, "'max_tokens' is 1000000"),
        ({"tools": [*TOOLS, {"type": "web_search_20250305", "name": "w"}]}, "'tools.2' is of type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'tools.0' is of type 'bash_20250124'"),
        ({"tools": [{"name": "a"}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "there are no 'tools'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "only text"),
        ({"messages": [{"role": "user", "content": [{"type": "mystery"}]}]}, "cannot stand here"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role is one of"),
        ({"container": "c"}, "'container' is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "no 'edits' but such"),
        ({"n": 2}, "Unknown parameter 'n'"),
    ],
)
def test_what_is_not_carried_out_is_refused_with_a_sentence(fields: dict[str, Any], says: str) -> None:
    for streamed in (False, True):
        answer = post(gateway_of(WritingBackend(HERMES)), {**fields, "stream": streamed})
        assert answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error"
        assert says in answer["error"]["message"]
        assert answer["request_id"]


@pytest.mark.parametrize("ignore", [True, False])
def test_tools_that_cannot_be_called_or_are_to_be_ignored_do_not_matter(ignore: bool) -> None:
    body: dict[str, Any] = {"tools": [{"type": "web_search_20250305", "name": "w"}, *TOOLS]}
    if not ignore:
        body["tool_choice"] = {"type": "tool", "name": "get_time"}
    assert post(gateway_of(WritingBackend(HERMES), ignore_unknown=ignore), body)["type"] == "message"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (403, "permission_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_the_types_that_anthropics_clients_know(status: int, kind: str) -> None:
    backend = WritingBackend(HERMES)
    backend.fails = ApiError(status, "No.", kind="server_error")
    assert post(gateway_of(backend), {})["error"] == {"type": kind, "message": "No."}
    backend.text = "Hello, it is"
    *_, last = stream(gateway_of(backend), {})
    assert (last["type"], last["error"]) == ("error", {"type": kind, "message": "No."})


def test_what_is_nowhere_is_told_in_the_same_form() -> None:
    async def send(method: str, path: str) -> Any:
        async with StubGateway().client() as http:
            return (await http.request(method, path)).json()

    assert asyncio.run(send("GET", "/v1/messages"))["error"]["type"] == "invalid_request_error"
    assert asyncio.run(send("POST", "/v1/messages/batches"))["error"]["type"] == "not_found_error"


def test_tokens_are_counted_as_they_would_be_read() -> None:
    gateway = StubGateway()
    fields = {"system": "be brief", "tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 2000}}
    fields["chat_template_kwargs"] = {"style": "terse"}
    answer = post(gateway, fields, "/v1/messages/count_tokens")
    assert answer == {"input_tokens": 3}
    (request,) = gateway.backend.requests
    assert request["method"] == "tokenize"
    assert [tool["function"]["name"] for tool in request["template"]["tools"]] == ["get_weather", "get_time"]
    assert request["template"]["arguments"] == {"enable_thinking": True, "style": "terse"}
