"""Answers as the `openai` client reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import openai
import pytest

from serve_apps.engine.protocol import SamplingParams
from tests.serve_apps.stub_gateway import StubGateway

Result = TypeVar("Result")
MESSAGES: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "count "}, {"type": "text", "text": "up"}]},
]


def ask(gateway: StubGateway, question: Callable[[openai.AsyncOpenAI], Awaitable[Result]]) -> Result:
    async def go() -> Result:
        async with gateway.client() as http:
            client = openai.AsyncOpenAI(
                base_url="http://gateway/v1", api_key="none", http_client=http, max_retries=0
            )
            return await question(client)

    return asyncio.run(go())


def test_a_completion() -> None:
    gateway = StubGateway()
    answer = ask(gateway, lambda c: c.completions.create(model="chat", prompt="a b", max_tokens=4, seed=7))
    assert [(c.index, c.text, c.finish_reason, c.logprobs) for c in answer.choices] == [
        (0, " 0 1 2 3", "length", None)
    ]
    assert answer.object == "text_completion"
    assert answer.model == "chat"
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
    }
    sent = gateway.backend.requests[0]
    assert sent["sampling"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 7,
        "stop": (),
        "ignore_eos": False,
        "logprobs": None,
    }


def test_sampling_fields_reach_the_replica() -> None:
    gateway = StubGateway()
    extra = {"top_k": -1, "ignore_eos": True}
    ask(
        gateway,
        lambda c: c.completions.create(
            model="chat", prompt=[5, 6], temperature=0, top_p=0.5, stop="x", extra_body=extra
        ),
    )
    sent = gateway.backend.requests[0]
    assert sent["prompt"] == [5, 6]
    assert sent["max_tokens"] is None
    sampling = {k: sent["sampling"][k] for k in ("temperature", "top_p", "top_k", "stop", "ignore_eos")}
    assert sampling == {"temperature": 0.0, "top_p": 0.5, "top_k": 0, "stop": ("x",), "ignore_eos": True}


def test_several_prompts_and_choices_come_in_order_and_prompts_count_once() -> None:
    gateway = StubGateway()
    answer = ask(
        gateway,
        lambda c: c.completions.create(model="chat", prompt=["a b c", "d"], n=2, max_tokens=2, seed=5),
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)
    sent = sorted(gateway.backend.requests, key=lambda request: request["request_id"])
    assert [(request["prompt"], request["sampling"]["seed"]) for request in sent] == [
        ("a b c", 5),
        ("a b c", 6),
        ("d", 5),
        ("d", 6),
    ]


def test_logprobs_of_a_completion() -> None:
    answer = ask(
        StubGateway(), lambda c: c.completions.create(model="chat", prompt="a", max_tokens=2, logprobs=2)
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [" 0", " 1"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{" 0": -1.0, " 1": -2.0}] * 2
    assert logprobs.text_offset == [0, 2]


def test_a_chat() -> None:
    gateway = StubGateway()
    answer = ask(
        gateway,
        lambda c: c.chat.completions.create(
            model="chat", messages=MESSAGES, max_completion_tokens=3, logprobs=True, top_logprobs=1, user="me"
        ),
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        " 0 1 2",
        "length",
    )
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    token = choice.logprobs.content[0]
    assert (token.token, token.logprob, token.bytes) == (" 0", -0.5, [32, 48])
    assert token.top_logprobs[0].token == " 0"
    assert gateway.backend.requests[0]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "count up"},
    ]


def test_a_streamed_completion_says_the_same_as_a_whole_one() -> None:
    async def stream(client: openai.AsyncOpenAI) -> tuple[str, list[Any]]:
        chunks = await client.completions.create(model="chat", prompt="a", max_tokens=5, stream=True)
        got = [chunk async for chunk in chunks]
        return "".join(chunk.choices[0].text for chunk in got), got

    text, chunks = ask(StubGateway(), stream)
    assert text == " 0 1 2 3 4"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_with_usage(n: int) -> None:
    async def stream(client: openai.AsyncOpenAI) -> list[Any]:
        chunks = await client.chat.completions.create(
            model="chat",
            messages=MESSAGES,
            max_tokens=3,
            n=n,
            stream=True,
            stream_options={"include_usage": True},
        )
        return [chunk async for chunk in chunks]

    *chunks, last = ask(StubGateway(), stream)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 3 * n)
    assert all(chunk.usage is None for chunk in chunks)
    for index in range(n):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == " 0 1 2"
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["length"]


@pytest.mark.parametrize("stream", [True, False])
def test_every_answer_of_a_model_says_which_replica_and_version_gave_it(stream: bool) -> None:
    async def go() -> None:
        async with StubGateway().client() as http:
            good = await http.post("/v1/completions", json={"model": "chat", "prompt": "a", "stream": stream})
            assert good.headers["x-shoal-replica"] == "replica-1"
            assert good.headers["x-shoal-model-version"] == "tiny@3"
            refused = await http.post(
                "/v1/completions", json={"model": "chat", "prompt": "a " * 80, "stream": stream}
            )
            assert refused.status_code == 400
            assert refused.headers["x-shoal-replica"] == "replica-2"
            assert refused.headers["x-shoal-model-version"] == "tiny@3"

    asyncio.run(go())


def test_the_models_are_listed() -> None:
    models = ask(StubGateway(), lambda c: c.models.list())
    assert [model.id for model in models.data] == ["chat"]
    assert ask(StubGateway(), lambda c: c.models.retrieve("chat")).id == "chat"


def test_health_readiness_metrics_and_the_api_document() -> None:
    gateway = StubGateway()

    async def go() -> None:
        async with gateway.client() as http:
            assert (await http.get("/health")).status_code == 200
            waiting = await http.get("/ready")
            assert (waiting.status_code, waiting.json()["waiting_for"]) == (503, ["warming"])
            gateway.service.table = type(gateway.table)(gateway.table.versions)
            assert (await http.get("/ready")).status_code == 200
            await http.post("/v1/completions", json={"model": "chat", "prompt": "a b", "max_tokens": 3})
            await http.post("/v1/completions", json={"model": "nobody", "prompt": "a"})
            text = (await http.get("/metrics")).text
            for line in (
                'shoal_gateway_requests_total{app="chat",endpoint="/v1/completions",status="200"} 1.0',
                'shoal_gateway_tokens_total{app="chat",kind="prompt"} 2.0',
                'shoal_gateway_tokens_total{app="chat",kind="completion"} 3.0',
                'shoal_gateway_errors_total{app="",code="model_not_found"} 1.0',
                'shoal_gateway_in_flight{app="chat"} 0.0',
            ):
                assert line in text
            document = (await http.get("/openapi.json")).json()
            body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
            assert body["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
            references = set(_references(document))
            assert references
            for reference in references:
                assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]

    asyncio.run(go())


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [r for value in node.values() for r in _references(value)]
    return [r for value in node for r in _references(value)] if isinstance(node, list) else []


def test_what_a_request_asks_of_the_sampling_reaches_the_replica() -> None:
    gateway = StubGateway()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    async def send() -> None:
        async with gateway.client() as http:
            body = {
                "model": "chat",
                "prompt": "a",
                "max_tokens": 2,
                "presence_penalty": 1,
                "frequency_penalty": -0.5,
                "repetition_penalty": 1.1,
                "min_p": 0.1,
                "min_tokens": 2,
                "logit_bias": {"7": 5, "9": -1.5},
                "stop_token_ids": [3],
                "priority": -2,
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            }
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            chat = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            form = {"response_format": {"type": "json_object"}}
            assert (await http.post("/v1/chat/completions", json={**chat, **form})).status_code == 200

    asyncio.run(send())
    first, second = gateway.backend.requests
    sampling = first["sampling"]
    assert first["priority"] == -2
    assert json.loads(sampling["json_schema"]) == schema
    assert sampling["logit_bias"] == ((7, 5.0), (9, -1.5))
    expected = {"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "min_p": 0.1}
    assert {name: sampling[name] for name in expected} == expected
    assert (sampling["min_tokens"], sampling["stop_token_ids"]) == (2, (3,))
    assert json.loads(second["sampling"]["json_schema"]) == {"type": "object"}
    # The engine takes them by these names.
    SamplingParams(max_tokens=1, **sampling)


def test_tools_and_their_calls_reach_the_chat_template() -> None:
    gateway = StubGateway()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]

    async def send() -> int:
        async with gateway.client() as http:
            body = {"model": "chat", "messages": messages, "tools": tools, "max_tokens": 1}
            return (await http.post("/v1/chat/completions", json=body)).status_code

    assert asyncio.run(send()) == 200
    (request,) = gateway.backend.requests
    assert request["template"] == {"tools": tools}
    functions = [{"name": "f", "parameters": {}}]
    assert request["reading"] == {"functions": functions, "mode": "auto", "name": None, "parallel": True}
    # As templates want them: clients send arguments as text.
    told = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert request["messages"][1]["tool_calls"] == [told]
    assert request["messages"][2] == messages[2]
