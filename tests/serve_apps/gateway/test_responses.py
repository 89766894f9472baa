"""/v1/responses as OpenAI's own client reads it: events have their forms; streamed and whole are the same."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from serve_apps.gateway.replica_requests import cache_salt
from serve_apps.openai.errors import ApiError
from tests.serve_apps.stub_gateway import StubGateway
from tests.serve_apps.writing_backend import HERMES, QWEN3, WritingBackend, gateway_of

TOOLS: Any = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": True},
    {"type": "function", "name": "get_time"},
]
SPACE: Any = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [TOOLS[1]]}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "北京 ☀️"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
AGENT = '<tool_call>\n{"name": "agents__get_time", "arguments": {}}\n</tool_call>'
EVENT = TypeAdapter(ResponseStreamEvent)
JSON = {"content-type": "application/json"}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


def post(gateway: StubGateway, body: dict[str, Any], path: str = "/v1/responses") -> Any:
    """The answer's document."""

    async def send() -> Any:
        async with gateway.client() as http:
            return (await http.post(path, json={"model": "chat", **body})).json()

    return asyncio.run(send())


def stream(gateway: StubGateway, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; each is named by its type, and has the form that OpenAI's client knows."""

    async def send() -> str:
        async with gateway.client() as http:
            answer = await http.post("/v1/responses", json={"model": "chat", "stream": True, **body})
            assert answer.headers["content-type"].startswith("text/event-stream")
            return answer.text

    events = []
    for number, text in enumerate(asyncio.run(send()).split("\n\n")[:-1]):
        name, _, data = text.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        events.append(event)
    return events


def replayed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a client puts together from the pieces, which must agree with the wholes."""
    items: list[dict[str, Any]] = []
    open_index = None
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert open_index is None, "one item after the other"
            open_index = event["output_index"]
            assert open_index == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "response.content_part.added":
            items[open_index]["content"].append(json.loads(json.dumps(event["part"])))
        elif kind.endswith(".delta"):
            item = items[event["output_index"]]
            assert (event["output_index"], event["item_id"]) == (open_index, item["id"])
            if kind == "response.function_call_arguments.delta":
                item["arguments"] += event["delta"]
            else:
                part = item["content"][event["content_index"]]
                part["text"] += event["delta"]
                part.setdefault("logprobs", []).extend(event.get("logprobs", ()))
                if item["type"] == "reasoning":
                    del part["logprobs"]
        elif kind == "response.output_text.done":
            part = items[open_index]["content"][0]
            assert (part["text"], part["logprobs"]) == (event["text"], event["logprobs"])
        elif kind == "response.reasoning_text.done":
            assert items[open_index]["content"][0]["text"] == event["text"]
        elif kind == "response.function_call_arguments.done":
            assert items[open_index]["arguments"] == event["arguments"]
        elif kind == "response.content_part.done":
            assert items[open_index]["content"] == [event["part"]]
        elif kind == "response.output_item.done":
            items[open_index]["status"] = event["item"]["status"]
            assert items[open_index] == event["item"]
            open_index = None
    assert open_index is None
    return items


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(response).replace(response["id"].removeprefix("resp_"), "ID")
    document: dict[str, Any] = json.loads(text)
    for number, item in enumerate(one for one in document["output"] if "call_id" in one):
        item["call_id"] = f"call-{number}"
    return {**document, "created_at": 0}


def told(response: dict[str, Any]) -> list[Any]:
    """Kind and text of each item."""
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in response["output"]
    ]


CASES: list[Any] = [
    ("Hello.", {}, [("message", "Hello.")]),
    ("", {}, [("message", "")]),
    ("<think>Hm.\n鱼</think>\n\nHi.", LOGPROBS, [("reasoning", "Hm.\n鱼"), ("message", "Hi.")]),
    (f"{NOW}", {"tools": TOOLS}, [("function_call", "{}")]),
    (
        f"<think>Hm.</think>Let me see.\n{PARIS}\n{NOW}",
        {"tools": TOOLS, **LOGPROBS},
        [
            ("reasoning", "Hm."),
            ("message", "Let me see."),
            ("function_call", '{"city": "北京 ☀️"}'),
            ("function_call", "{}"),
        ],
    ),
    (
        f"One.{NOW} Two.{PARIS} Three.",
        {"tools": TOOLS, **LOGPROBS},
        [
            ("message", "One."),
            ("function_call", "{}"),
            ("function_call", '{"city": "北京 ☀️"}'),
            ("message", " Two. Three."),
        ],
    ),
    (PARIS, {"tools": TOOLS, "tool_choice": "none"}, [("message", PARIS)]),
    (
        '{"city": "Paris"}',
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "get_weather"}},
        [("function_call", '{"city": "Paris"}')],
    ),
]


@pytest.mark.parametrize(("text", "fields", "expected"), CASES)
@pytest.mark.parametrize("ends", ["stop", "length"])
def test_an_answer_is_the_same_streamed_and_whole(
    text: str, fields: dict[str, Any], expected: Any, ends: Any
) -> None:
    for seed in range(3):
        backend = WritingBackend(QWEN3)
        backend.text, backend.ends = text, ends
        gateway = gateway_of(backend)
        body = {"input": "hi", **fields}
        backend.chance = random.Random(seed)
        whole = post(gateway, body)
        Response.model_validate(whole)
        backend.chance = random.Random(seed)
        first, second, *between, last = stream(gateway, body)
        assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
        assert first["response"]["status"] == second["response"]["status"] == "in_progress"
        status = "incomplete" if ends == "length" else "completed"
        assert last["type"] == f"response.{status}"
        assert last["response"]["output"] == replayed(between)
        assert without_ids(last["response"]) == without_ids(whole)
        assert told(whole) == expected
        assert whole["status"] == status
        reason = {"reason": "max_output_tokens"} if ends == "length" else None
        assert whole["incomplete_details"] == reason
        assert [item["status"] for item in whole["output"]][-1] == status


def test_openais_client_reads_both() -> None:
    backend = WritingBackend(QWEN3)
    backend.text = f"<think>Hm.</think>Let me see.\n{PARIS}"
    gateway = gateway_of(backend)

    async def both() -> tuple[Any, Any]:
        async with gateway.client() as http:
            client = openai.AsyncOpenAI(
                api_key="none", base_url="http://gateway/v1", http_client=http, max_retries=0
            )
            body: dict[str, Any] = {"model": "chat", "input": "hi", "tools": TOOLS, "metadata": {"a": "b"}}
            whole = await client.responses.create(**body)
            async with client.responses.stream(**body) as events:
                async for _ in events:
                    pass
                return whole, await events.get_final_response()

    for answer in asyncio.run(both()):
        assert answer.output_text == "Let me see."
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert (answer.output[2].name, answer.output[2].arguments) == ("get_weather", '{"city": "北京 ☀️"}')
        assert answer.metadata == {"a": "b"}
        assert answer.usage.input_tokens == 5
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
        assert answer.store is False


def test_what_a_client_was_told_it_may_hand_back() -> None:
    backend = WritingBackend(QWEN3)
    backend.text = f"<think>Hm.</think>One.{NOW}{AGENT} Two."
    gateway = gateway_of(backend)
    tools = [*TOOLS, SPACE]
    question = {"role": "user", "content": [{"type": "input_text", "text": "What time is it?"}]}
    output = post(gateway, {"input": [question], "tools": tools})["output"]
    assert [item.get("namespace") for item in output] == [None, None, None, "agents", None]
    calls = [item for item in output if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "8:00"},
        {
            "type": "function_call_output",
            "call_id": calls[1]["call_id"],
            "output": [{"type": "input_text", "text": "9:00"}],
        },
    ]
    # As the client's models dump it: with nulls, ids and whatever they know beside.
    dumped = [
        {**one, "id": None, "status": "completed", "encrypted_content": None, "phase": None} for one in output
    ]
    leading = [{"role": "developer", "content": "be brief"}, {"role": "system", "content": "be kind"}]
    body = {"instructions": "be true", "input": [*leading, question, *dumped, *results], "tools": tools}
    assert post(gateway, body)["status"] == "completed"
    messages = backend.requests[-1]["messages"]
    assert messages == [
        {"role": "system", "content": "be true\n\nbe brief\n\nbe kind"},
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": "One.\n\n Two.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": calls[0]["call_id"],
                    "type": "function",
                    "function": {"name": "get_time", "arguments": {}},
                },
                {
                    "id": calls[1]["call_id"],
                    "type": "function",
                    "function": {"name": "agents__get_time", "arguments": {}},
                },
            ],
        },
        {"role": "tool", "content": "8:00", "tool_call_id": calls[0]["call_id"]},
        {"role": "tool", "content": "9:00", "tool_call_id": calls[1]["call_id"]},
    ]


def test_a_call_that_is_no_json_may_be_handed_back_too() -> None:
    backend = WritingBackend(HERMES)
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"city": "Par'}
    output = {"type": "function_call_output", "call_id": "1", "output": "That is no JSON."}
    assert post(gateway_of(backend), {"input": [call, output]})["status"] == "completed"
    (told_call,) = backend.requests[0]["messages"][0]["tool_calls"]
    assert told_call["function"]["arguments"] == {}


def test_what_is_asked_reaches_the_replica() -> None:
    backend = WritingBackend(QWEN3)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "input": "hi",
        "max_output_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_logprobs": 2,
        "reasoning": {"effort": "low", "summary": "auto"},
        "chat_template_kwargs": {"style": "terse"},
        "top_k": 9,
        "seed": 3,
        "stop": ["END"],
        "priority": -1,
        "cache_salt": "s",
        "text": {
            "verbosity": "low",
            "format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True},
        },
    }
    answer = post(gateway_of(backend), body)
    (request,) = backend.requests
    sampling = request["sampling"]
    assert request["max_tokens"] == 7
    assert (sampling["temperature"], sampling["top_p"], sampling["logprobs"]) == (0.5, 0.25, 2)
    assert json.loads(sampling["json_schema"]) == schema
    assert (sampling["top_k"], sampling["seed"], sampling["stop"]) == (9, 3, ("END",))
    assert (request["priority"], request["cache_salt"]) == (-1, cache_salt(None, "s"))
    arguments = {"reasoning_effort": "low", "enable_thinking": True, "style": "terse"}
    assert request["template"]["arguments"] == arguments
    assert answer["max_output_tokens"] == 7
    assert answer["text"]["format"] == {"type": "json_schema", "name": "n", "schema": schema}
    assert answer["reasoning"] == {"effort": "low", "summary": "auto"}


def test_vllms_structures_go_with_no_other_form() -> None:
    backend = WritingBackend(HERMES)
    body: dict[str, Any] = {"input": "hi", "structured_outputs": {"choice": ["a", "b"]}}
    assert post(gateway_of(backend), body)["status"] == "completed"
    assert list(backend.requests[0]["sampling"]["choice"]) == ["a", "b"]
    body["text"] = {"format": {"type": "json_object"}}
    error = post(gateway_of(backend), body)["error"]
    assert "'structured_outputs' and 'text.format' both" in error["message"]


def test_tokens_are_counted_as_they_would_be_read() -> None:
    gateway = StubGateway()
    fields = {"instructions": "be brief", "input": "hi", "tools": TOOLS}
    answer = post(gateway, fields, "/v1/responses/input_tokens")
    assert answer == {"object": "response.input_tokens", "input_tokens": 3}
    (request,) = gateway.backend.requests
    assert request["method"] == "tokenize"
    assert [tool["function"]["name"] for tool in request["template"]["tools"]] == ["get_weather", "get_time"]


CODEX = {
    "input": [
        {"type": "message", "id": "m_1", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    ],
    "tools": [*TOOLS, SPACE, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "1",
    "client_metadata": {"session_id": "1"},
}
"""As codex 0.169 asks without any settings but the address and the model."""


def test_what_codex_sends_is_taken() -> None:
    backend = WritingBackend(HERMES)
    assert post(gateway_of(backend), CODEX)["status"] == "completed"
    names = [one["name"] for one in backend.requests[0]["reading"]["functions"]]
    assert names == ["get_weather", "get_time", "agents__get_time"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search', which this server does not have"),
        ({"tools": [*TOOLS, {"type": "custom", "name": "p"}]}, "tools", "'tools.2' is of type 'custom'"),
        ({"tools": [{"type": "function"}]}, "tools", "must have a name"),
        ({"tool_choice": "required"}, "tool_choice", "there are no 'tools'"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "names a function"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no answers"),
        ({"conversation": "conv_1"}, "conversation", "keeps no answers"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "keeps no prompts"),
        ({"background": True}, "background", "waits, or streams"),
        ({"input": []}, "input", "not empty"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "store: false"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input", "the role of item 0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input",
            "images and audio are not supported",
        ),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "'max_output_tokens' is 1000000"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is required"),
        ({"max_tokens": 5}, "max_tokens", "Unknown parameter"),
        ({"metadata": {"a": 1}}, "metadata", "values are strings"),
    ],
)
def test_what_is_not_carried_out_is_refused_with_a_sentence(
    fields: dict[str, Any], param: str, says: str
) -> None:
    for streamed in (False, True):
        error = post(gateway_of(WritingBackend(HERMES)), {"input": "hi", "stream": streamed, **fields})
        assert says in error["error"]["message"]
        assert error["error"]["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"tool_choice": {"type": "function", "name": "get_time"}},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOLS[1]]}},
    ],
)
def test_tools_that_cannot_be_called_do_not_matter(fields: dict[str, Any]) -> None:
    body = {"input": "hi", "tools": [{"type": "web_search"}, *TOOLS], **fields}
    assert post(gateway_of(WritingBackend(HERMES)), body)["status"] == "completed"


def test_where_what_is_not_known_is_passed_over_so_are_tools() -> None:
    gateway = gateway_of(WritingBackend(HERMES), ignore_unknown=True)
    answer = post(gateway, {"input": "hi", "tools": [{"type": "file_search"}, TOOLS[1]]})
    # It does not pretend to have them.
    assert [tool["type"] for tool in answer["tools"]] == ["function"]


def test_what_a_replica_refuses_is_named_as_the_client_does() -> None:
    gateway = StubGateway(max_tokens=None)
    error = post(gateway, {"input": "a " * 80})["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "p")
    backend = WritingBackend(HERMES)
    backend.fails = ApiError(400, "No.", param="messages")
    assert post(gateway_of(backend), {"input": "hi"})["error"]["param"] == "input"


def test_an_answer_repeats_what_can_be_repeated_only() -> None:
    async def send(schema: str) -> Any:
        body = '{"model":"chat","input":"hi","tools":[{"type":"function","name":"f","parameters":%s}]}'
        async with gateway_of(WritingBackend(HERMES)).client() as http:
            return await http.post("/v1/responses", content=body % schema, headers=JSON)

    for depth, status in ((50, 200), (200, 400), (970, 400)):
        assert asyncio.run(send('{"a":' * depth + "{}" + "}" * depth)).status_code == status
    answer = asyncio.run(send('{"maximum": 1e999}'))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_a_stream_that_breaks_off_says_so_with_what_was_there() -> None:
    backend = WritingBackend(HERMES)
    backend.text, backend.fails = "Hello, it is", ApiError(500, "It broke.", kind="server_error", code="c")
    *events, last = stream(gateway_of(backend), {"input": "hi"})
    assert events
    assert last["type"] == "response.failed"
    response = last["response"]
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert response["error"]["message"] == "It broke."
    assert "Hello, it is".startswith(response["output"][0]["content"][0]["text"])


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/resp_1"), ("DELETE", "/resp_1"), ("POST", "/resp_1/cancel"), ("GET", "/resp_1/input_items")],
)
def test_no_response_is_kept(method: str, path: str) -> None:
    async def send() -> Any:
        async with StubGateway().client() as http:
            return await http.request(method, f"/v1/responses{path}")

    answer = asyncio.run(send())
    assert answer.status_code == 404
    assert "keeps no responses" in answer.json()["error"]["message"]
