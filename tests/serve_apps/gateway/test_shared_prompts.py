"""A long prompt of several answers goes to the replicas as tokens, once it is known to fit."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from serve_apps.gateway.shared_prompts import LONG_CHARACTERS
from serve_apps.openai.errors import ApiError
from tests.serve_apps.stub_gateway import CONTEXT_LENGTH, StubGateway

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG_WORDS = "x" * (LONG_CHARACTERS // 2)
FITS = f"{LONG_WORDS} {LONG_WORDS} b"
TOO_LONG = "ab " * LONG_CHARACTERS


def asked(prompt: str, path: str) -> dict[str, Any]:
    return {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}


def post(gateway: StubGateway, path: str, **fields: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with gateway.client() as client:
            return await client.post(path, json={"model": "chat", "max_tokens": 2, **fields})

    return asyncio.run(go())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_long_prompt_is_tokenized_once_for_all_its_answers(path: str) -> None:
    gateway = StubGateway(queue=200)
    answer = post(gateway, path, n=100, **asked(FITS, path))
    assert len(answer.json()["choices"]) == 100
    assert answer.json()["usage"]["prompt_tokens"] == 3
    first, *others = gateway.backend.requests
    assert first["method"] == "tokenize"
    assert [request.get("prompt") for request in others] == [[0, 1, 2]] * 100
    assert not any("messages" in request for request in others)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_one_that_fits_nowhere_is_refused_once(path: str) -> None:
    gateway = StubGateway(queue=200)
    answer = post(gateway, path, n=128, **asked(TOO_LONG, path))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("prompt" if path == COMPLETIONS else "messages")
    assert [request["method"] for request in gateway.backend.requests] == ["tokenize"]


@pytest.mark.parametrize("lost", [[0, None], [0, 0, None]])
def test_it_survives_the_loss_of_the_replica_that_was_to_tokenize_it(lost: list[int | None]) -> None:
    gateway = StubGateway(queue=200)
    gateway.backend.script = lost
    answer = post(gateway, COMPLETIONS, n=2, **asked(FITS, COMPLETIONS))
    assert [choice["text"] for choice in answer.json()["choices"]] == [" 0 1", " 0 1"]


def test_a_failure_to_tokenize_it_is_left_to_its_answers_which_know_other_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = StubGateway(queue=200)

    async def fail(application: str, method: str, request: Any) -> Any:
        raise ApiError(500, "the replica failed", kind="server_error")

    monkeypatch.setattr(gateway.backend, "ask", fail)
    answer = post(gateway, COMPLETIONS, n=2, **asked(FITS, COMPLETIONS))
    assert [choice["text"] for choice in answer.json()["choices"]] == [" 0 1", " 0 1"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": [1] * (CONTEXT_LENGTH - 1)}),
        (COMPLETIONS, {"prompt": [[1], [1] * CONTEXT_LENGTH]}),
        ("/v1/embeddings", {"input": [1] * (CONTEXT_LENGTH + 1), "max_tokens": None}),
    ],
)
def test_tokens_that_do_not_fit_reach_no_replica(path: str, fields: dict[str, Any]) -> None:
    gateway = StubGateway(queue=200)
    asking = {name: value for name, value in {"max_tokens": 2, **fields}.items() if value is not None}

    async def go() -> httpx.Response:
        async with gateway.client() as client:
            return await client.post(path, json={"model": "chat", **asking})

    answer = asyncio.run(go())
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert not gateway.backend.requests


@pytest.mark.parametrize("fields", [{"prompt": "a b", "n": 5}, {"prompt": ["a", "b"]}, {"prompt": FITS}])
def test_what_is_short_or_not_shared_goes_as_it_is(fields: dict[str, Any]) -> None:
    gateway = StubGateway(queue=200)
    assert post(gateway, COMPLETIONS, **fields).status_code == 200
    assert all("method" not in request for request in gateway.backend.requests)
    assert {request["prompt"] for request in gateway.backend.requests} <= {"a b", "a", "b", FITS}
