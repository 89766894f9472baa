"""Embeddings as the `openai` client reads them, and tokens as vLLM's clients do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
import openai
import pytest

from tests.serve_apps.stub_gateway import StubGateway


def post(gateway: StubGateway, path: str, **body: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with gateway.client() as http:
            return await http.post(path, json=body)

    return asyncio.run(go())


@pytest.mark.parametrize("encoding", ["float", None])
def test_embeddings_of_several_inputs_come_in_their_order(encoding: Any) -> None:
    async def go() -> Any:
        async with StubGateway().client() as http:
            client = openai.AsyncOpenAI(
                base_url="http://gateway/v1", api_key="none", http_client=http, max_retries=0
            )
            more = {"encoding_format": encoding} if encoding else {}
            return await client.embeddings.create(model="chat", input=["a b c", "a"], **more)

    answer = asyncio.run(go())
    assert [(one.index, one.embedding) for one in answer.data] == [(0, [3.0, 0.5]), (1, [1.0, 0.5])]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (4, 4, "chat")


def test_an_embedding_is_asked_for_again_where_its_replica_was_lost() -> None:
    gateway = StubGateway()
    gateway.backend.script = [0, 0, None]
    answer = post(gateway, "/v1/embeddings", model="chat", input="a b")
    assert answer.status_code == 200
    assert answer.headers["x-shoal-replica"] == "replica-3"
    assert answer.headers["x-shoal-model-version"] == "tiny@3"
    gateway.backend.breaks, gateway.backend.script = True, [0, 0, None]
    answer = post(gateway, "/v1/embeddings", model="chat", input="a b")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "engines_broke")
    gateway.backend.breaks, gateway.backend.script = False, [0] * 10
    assert post(gateway, "/v1/embeddings", model="chat", input="a b").status_code == 503


def test_tokens_and_back() -> None:
    gateway = StubGateway()
    answer = post(gateway, "/tokenize", model="chat", prompt="a b c")
    assert answer.json() == {"tokens": [0, 1, 2], "count": 3, "max_model_len": 64}
    messages = [{"role": "user", "content": "a b"}]
    assert post(gateway, "/tokenize", model="chat", messages=messages).json()["count"] == 2
    assert post(gateway, "/detokenize", model="chat", tokens=[4, 5]).json() == {"prompt": "4 5"}


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/embeddings", {"input": []}, 400, "invalid_value", "input"),
        ("/v1/embeddings", {"input": "a " * 100}, 400, "context_length_exceeded", "input"),
        ("/v1/embeddings", {}, 400, "missing_required_parameter", "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, 400, "unknown_parameter", "dimensions"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "invalid_value", "input"),
        ("/v1/embeddings", {"input": "a", "model": "nobody"}, 404, "model_not_found", "model"),
        ("/tokenize", {}, 400, "missing_required_parameter", None),
        ("/tokenize", {"prompt": 5}, 400, "invalid_type", "prompt"),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "invalid_type", "tokens"),
    ],
)
def test_a_wrong_request_is_refused(
    path: str, body: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    answer = post(StubGateway(), path, **{"model": "chat", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


def test_embeddings_count_for_and_against_their_version_as_answers_do() -> None:
    gateway = StubGateway()
    assert post(gateway, "/v1/embeddings", model="chat", input=["a", "b"]).status_code == 200
    assert post(gateway, "/v1/embeddings", model="chat", input="a " * 100).status_code == 400
    assert post(gateway, "/tokenize", model="chat", prompt="a").status_code == 200
    report = gateway.service.traffic.report()
    assert (report["requests"], +Counter(report["errors"])) == ({"chat 0": 3}, {})
    gateway.service.traffic.told()
    gateway.backend.breaks, gateway.backend.script = True, [0, None]
    assert post(gateway, "/v1/embeddings", model="chat", input="a").status_code == 200
    report = gateway.service.traffic.report()
    assert (report["requests"], report["errors"]) == ({"chat 0": 2}, {"chat 0": 1})


def test_as_many_inputs_as_openai_takes_go_in_turn() -> None:
    gateway = StubGateway()
    ask, running, most = gateway.backend.ask, 0, 0

    async def watched(application: str, method: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0)
        running -= 1
        return await ask(application, method, request)

    gateway.backend.ask = watched  # type: ignore[method-assign]
    inputs = ["a " * (1 + number % 7) for number in range(2048)]
    answer = post(gateway, "/v1/embeddings", model="chat", input=inputs)
    assert answer.status_code == 200
    assert [int(one["embedding"][0]) for one in answer.json()["data"]] == [
        1 + number % 7 for number in range(2048)
    ]
    assert most == gateway.service.traffic.table.versions["chat"][0].spec.config.limits.batch
