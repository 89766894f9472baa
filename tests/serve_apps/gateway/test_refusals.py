"""Every request that cannot be served gets OpenAI's error shape, a fitting status, and reaches no replica."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import jsonschema
import pytest

from tests.serve_apps.stub_gateway import StubGateway

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 10},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


def send(gateway: StubGateway, method: str, path: str, **content: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with gateway.client() as client:
            return await client.request(method, path, **content)

    return asyncio.run(go())


def assert_error(answer: httpx.Response, status: int, code: str | None, param: str | None) -> None:
    jsonschema.validate(answer.json(), ERROR)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"model": "nobody"}, 404, "model_not_found", "model"),
        ({"model": "warming"}, 503, "unavailable", None),
        ({"model": None}, 400, "missing_required_parameter", "model"),
        ({"model": 7}, 400, "invalid_type", "model"),
        ({"model": "a\x00b"}, 404, "model_not_found", "model"),
        ({"prompt": None}, 400, "missing_required_parameter", "prompt"),
        ({"prompt": []}, 400, "invalid_value", "prompt"),
        ({"prompt": [[]]}, 400, "invalid_value", "prompt"),
        ({"prompt": ["a", 1]}, 400, "invalid_value", "prompt"),
        ({"prompt": [1, -2]}, 400, "invalid_value", "prompt"),
        ({"prompt": [True]}, 400, "invalid_value", "prompt"),
        ({"prompt": {"text": "x"}}, 400, "invalid_value", "prompt"),
        ({"prompt": "x " * 100}, 400, "context_length_exceeded", "p"),
        ({"max_tokens": -1}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": "5"}, 400, "invalid_type", "max_tokens"),
        ({"max_tokens": 5.5}, 400, "invalid_type", "max_tokens"),
        ({"max_tokens": True}, 400, "invalid_type", "max_tokens"),
        ({"max_tokens": 33}, 400, "max_tokens_exceeded", "max_tokens"),
        ({"max_tokens": 10**30}, 400, "max_tokens_exceeded", "max_tokens"),
        ({"temperature": -0.1}, 400, "invalid_value", "temperature"),
        ({"temperature": 2.1}, 400, "invalid_value", "temperature"),
        ({"temperature": "hot"}, 400, "invalid_type", "temperature"),
        ({"top_p": 0}, 400, "invalid_value", "top_p"),
        ({"top_p": 1.5}, 400, "invalid_value", "top_p"),
        ({"top_k": -2}, 400, "invalid_value", "top_k"),
        ({"seed": 2**63}, 400, "invalid_value", "seed"),
        ({"seed": 1.5}, 400, "invalid_type", "seed"),
        ({"n": 0}, 400, "invalid_value", "n"),
        ({"n": 1000}, 400, "invalid_value", "n"),
        ({"n": 9}, 400, None, "n"),
        ({"stop": 3}, 400, "invalid_value", "stop"),
        ({"stop": [""]}, 400, "invalid_value", "stop"),
        ({"stop": ["x"] * 17}, 400, "invalid_value", "stop"),
        ({"stream": "yes"}, 400, "invalid_type", "stream"),
        ({"stream_options": {"include_usage": True}}, 400, None, "stream_options"),
        ({"logprobs": True}, 400, "invalid_type", "logprobs"),
        ({"logprobs": 21}, 400, "invalid_value", "logprobs"),
        ({"echo": 1}, 400, "invalid_type", "echo"),
        ({"best_of": 2}, 400, "unsupported_parameter", "best_of"),
        ({"suffix": "end"}, 400, "unsupported_parameter", "suffix"),
        ({"presence_penalty": 2.5}, 400, "invalid_value", "presence_penalty"),
        ({"frequency_penalty": False}, 400, "invalid_type", "frequency_penalty"),
        ({"repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, 400, "invalid_value", "repetition_penalty"),
        ({"repetition_penalty": 1e300}, 400, "invalid_value", "repetition_penalty"),
        ({"min_p": 2}, 400, "invalid_value", "min_p"),
        ({"min_tokens": -1}, 400, "invalid_value", "min_tokens"),
        ({"stop_token_ids": [-1]}, 400, "invalid_value", "stop_token_ids"),
        ({"stop_token_ids": "7"}, 400, "invalid_type", "stop_token_ids"),
        ({"priority": 1.5}, 400, "invalid_type", "priority"),
        ({"logit_bias": {"1": 101}}, 400, "invalid_value", "logit_bias"),
        ({"logit_bias": {"one": 1}}, 400, "invalid_value", "logit_bias"),
        ({"logit_bias": {"1": True}}, 400, "invalid_value", "logit_bias"),
        ({"logit_bias": [1]}, 400, "invalid_value", "logit_bias"),
        ({"response_format": "json"}, 400, "invalid_type", "response_format"),
        ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format"),
        ({"temprature": 0}, 400, "unknown_parameter", "temprature"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(
    change: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    gateway = StubGateway()
    answer = send(gateway, "POST", COMPLETIONS, json={"model": "chat", "prompt": "one two", **change})
    assert_error(answer, status, code, param)
    reached = 1 if code == "context_length_exceeded" else 0
    assert len(gateway.backend.requests) == reached


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hello"}, "invalid_type", "messages"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "invalid_value", "messages"),
        ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_value", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "invalid_value",
            "messages",
        ),
        ({"top_logprobs": 2}, None, "top_logprobs"),
        ({"logprobs": 2}, "invalid_type", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"max_completion_tokens": -3}, "invalid_value", "max_completion_tokens"),
        ({"max_completion_tokens": 33}, "max_tokens_exceeded", "max_completion_tokens"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages.0.content"),
        ({"tools": "none"}, "invalid_value", "tools"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "invalid_value", "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": "none"}}]}, "invalid_value", "tools"),
        ({"tools": [{"function": {"name": "f"}}] * 2}, "invalid_value", "tools"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "invalid_value", "tool_choice"),
        ({"tool_choice": "always"}, "invalid_value", "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, None, "continue_final_message"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(change: dict[str, Any], code: str | None, param: str) -> None:
    gateway = StubGateway()
    answer = send(gateway, "POST", CHAT, json={"model": "chat", "messages": MESSAGES, **change})
    assert_error(answer, 400, code, param)
    assert not gateway.backend.requests


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(missing: str) -> None:
    document = {"model": "chat", "prompt": "x"}
    del document[missing]
    answer = send(StubGateway(), "POST", COMPLETIONS, json=document)
    assert_error(answer, 400, "missing_required_parameter", missing)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"{'model': 'chat'}",
        b'{"model": "chat", "prompt": "x", "temperature": NaN}',
        b'{"model": "chat", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "chat", "prompt": "\\ud800"}',
        b"[" * 50_000,
    ],
    ids=["empty", "cut", "binary", "python", "nan", "huge number", "half a surrogate", "deep"],
)
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    answer = send(StubGateway(), "POST", COMPLETIONS, content=body)
    assert_error(answer, 400, "invalid_json", None)


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"3"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    assert_error(send(StubGateway(), "POST", COMPLETIONS, content=body), 400, None, None)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_above_the_limit_is_refused_without_being_read_to_its_end(declared: bool) -> None:
    gateway = StubGateway(body_bytes=10_000)
    parts_read = 0

    async def parts() -> Any:
        nonlocal parts_read
        for _ in range(1000):
            parts_read += 1
            yield b"x" * 1000

    headers = {"content-length": "1000000"} if declared else {}
    answer = send(gateway, "POST", COMPLETIONS, content=parts(), headers=headers)
    assert_error(answer, 413, "request_too_large", None)
    assert parts_read <= (1 if declared else 11)


def test_a_body_at_the_limit_is_served() -> None:
    document = b'{"model": "chat", "prompt": "x"}'
    gateway = StubGateway(body_bytes=len(document))
    assert send(gateway, "POST", COMPLETIONS, content=document).status_code == 200
    assert send(gateway, "POST", COMPLETIONS, content=document + b" ").status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v2/nothing", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/nobody", 404, "model_not_found"),
    ],
)
def test_a_wrong_address_is_an_error_of_the_same_shape(
    method: str, path: str, status: int, code: str
) -> None:
    answer = send(StubGateway(), method, path)
    jsonschema.validate(answer.json(), ERROR)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    if status == 405:
        assert answer.headers["allow"]


def test_a_failure_of_the_gateway_itself_keeps_the_shape_and_tells_no_internals() -> None:
    gateway = StubGateway()

    def broken(*_: Any) -> Any:
        raise KeyError("a secret")

    gateway.backend.generate = broken  # type: ignore[method-assign]
    answer = send(gateway, "POST", COMPLETIONS, json={"model": "chat", "prompt": "x"})
    jsonschema.validate(answer.json(), ERROR)
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_a_request_id_is_taken_or_made() -> None:
    given = send(StubGateway(), "GET", "/health", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    odd = send(StubGateway(), "GET", "/health", headers={"x-request-id": "a b" * 100})
    assert odd.headers["x-request-id"] not in ("", "a b" * 100)
