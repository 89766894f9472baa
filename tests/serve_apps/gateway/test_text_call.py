"""Embeddings as the `openai` client reads them, and tokens as vLLM's clients do."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
import openai
import pytest

from serve_apps.gateway.app_table import AppTable
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
    expected = {"tokens": [0, 1, 2], "count": 3, "max_model_len": 64, "token_strs": None}
    assert answer.json() == expected
    answer = post(gateway, "/tokenize", model="chat", prompt="a b c", return_token_strs=True)
    assert answer.json() == {**expected, "token_strs": ["t0", "t1", "t2"]}
    messages = [{"role": "user", "content": "a b"}]
    assert post(gateway, "/tokenize", model="chat", messages=messages).json()["count"] == 2
    assert post(gateway, "/detokenize", model="chat", tokens=[4, 5]).json() == {"prompt": "4 5"}


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/embeddings", {"input": []}, 400, "invalid_value", "input"),
        ("/v1/embeddings", {"input": "a " * 100}, 400, "context_length_exceeded", "input"),
        ("/v1/embeddings", {}, 400, "missing_required_parameter", "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "invalid_value", "dimensions"),
        (
            "/v1/embeddings",
            {"input": "a", "truncate_prompt_tokens": 65},
            400,
            "invalid_value",
            "truncate_prompt_tokens",
        ),
        ("/v1/embeddings", {"input": [1] * 65}, 400, "context_length_exceeded", "input"),
        ("/v1/embeddings", {"input": "a", "padding": "max_length"}, 400, "unsupported_parameter", "padding"),
        ("/pooling", {"input": "a", "task": "classify"}, 400, "unsupported_parameter", "task"),
        ("/pooling", {}, 400, "missing_required_parameter", "input"),
        ("/score", {"text_1": "a"}, 400, "missing_required_parameter", None),
        ("/score", {"text_1": "a", "documents": "b"}, 400, "missing_required_parameter", None),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, 400, "invalid_value", "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, 400, "invalid_value", "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2048}, 400, "invalid_value", "text_2"),
        ("/rerank", {"query": "a"}, 400, "missing_required_parameter", "documents"),
        ("/rerank", {"query": "a", "documents": [{"text": "b"}]}, 400, "invalid_value", "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, 400, "invalid_value", "top_n"),
        (
            "/tokenize",
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            400,
            "missing_required_parameter",
            None,
        ),
        (
            "/tokenize",
            {"prompt": "a", "continue_final_message": True},
            400,
            "invalid_value",
            "continue_final_message",
        ),
        (
            "/tokenize",
            {
                "messages": [{"role": "user", "content": "a"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            400,
            None,
            "continue_final_message",
        ),
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


def test_pooling_gives_embeddings_in_vllms_shape() -> None:
    answer = post(StubGateway(), "/pooling", model="chat", input=["a b", "a"]).json()
    assert answer["data"] == [
        {"object": "pooling", "index": 0, "data": [2.0, 0.5]},
        {"object": "pooling", "index": 1, "data": [1.0, 0.5]},
    ]
    assert (answer["object"], answer["model"]) == ("list", "chat")
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def cosine(first: int, second: int) -> float:
    """Of the stub's embeddings of texts of so many words."""
    a, b = (first, 0.5), (second, 0.5)
    return (a[0] * b[0] + a[1] * b[1]) / (math.hypot(*a) * math.hypot(*b))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_scores_are_cosines_of_one_to_many_or_of_each_to_its_own(path: str, names: tuple[str, str]) -> None:
    def scores(first: Any, second: Any) -> list[float]:
        answer = post(StubGateway(), path, model="chat", **{names[0]: first, names[1]: second})
        data = answer.json()["data"]
        assert [(one["object"], one["index"]) for one in data] == [("score", i) for i in range(len(data))]
        return [one["score"] for one in data]

    assert scores("a", ["a b", "a"]) == pytest.approx([cosine(1, 2), 1.0])
    assert scores(["a", "a b c"], ["a b", "a"]) == pytest.approx([cosine(1, 2), cosine(3, 1)])
    assert scores("a", "a b") == pytest.approx([cosine(1, 2)])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_likeness(path: str) -> None:
    documents = ["a b c d e f", "a b", "a b c"]
    asked: dict[str, Any] = {"model": "chat", "query": "x y", "documents": documents}
    answer = post(StubGateway(), path, **asked).json()
    assert [one["index"] for one in answer["results"]] == [1, 2, 0]
    assert [one["document"]["text"] for one in answer["results"]] == [documents[i] for i in (1, 2, 0)]
    found = [one["relevance_score"] for one in answer["results"]]
    assert found == pytest.approx([1.0, cosine(2, 3), cosine(2, 6)])
    assert answer["usage"] == {"prompt_tokens": 13, "total_tokens": 13}
    (best,) = post(StubGateway(), path, **asked, top_n=1, return_documents=False).json()["results"]
    assert best == {"index": 1, "relevance_score": pytest.approx(1.0)}
    assert len(post(StubGateway(), path, **asked, top_n=0).json()["results"]) == 3


def test_documents_are_cut_and_queries_are_not() -> None:
    gateway = StubGateway()
    post(gateway, "/rerank", model="chat", query="a b c", documents=["a b c"], max_tokens_per_doc=2)
    assert [request.get("cut") for request in gateway.backend.requests] == [None, 2]
    gateway = StubGateway()
    post(
        gateway,
        "/rerank",
        model="chat",
        query="a b c",
        documents="a b c",
        max_tokens_per_doc=1000,
        truncate_prompt_tokens=5,
    )
    assert [(r["cut"], r["cut_side"]) for r in gateway.backend.requests] == [(5, "right"), (5, "right")]


def test_how_an_input_is_embedded_reaches_the_replica() -> None:
    gateway = StubGateway()
    fields = {"dimensions": 8, "truncate_prompt_tokens": 4, "truncation_side": "left", "use_activation": True}
    more = {**fields, "add_special_tokens": False, "embed_dtype": "float32", "padding": "do_not_pad"}
    answer = post(gateway, "/v1/embeddings", model="chat", input=[[1] * 100, [2]], **more)
    assert answer.status_code == 200
    how = {"dimensions": 8, "scaled": True, "cut": 4, "cut_side": "left", "special_tokens": False}
    assert all(how.items() <= request.items() for request in gateway.backend.requests)


def test_the_model_may_be_left_out_where_there_is_one() -> None:
    gateway = StubGateway()
    assert post(gateway, "/tokenize", prompt="a b").json()["count"] == 2
    assert post(gateway, "/detokenize", tokens=[4]).json() == {"prompt": "4"}
    assert post(gateway, "/v1/embeddings", input="a").json()["model"] == "chat"
    table = gateway.table
    gateway.service.table = gateway.table = AppTable({**table.versions, "other": table.versions["chat"]})
    error = post(gateway, "/tokenize", prompt="a b").json()["error"]
    assert (error["code"], error["param"]) == ("missing_required_parameter", "model")
    assert "chat, other" in error["message"]


def test_a_tokenizer_tells_of_itself() -> None:
    async def get(gateway: StubGateway, path: str) -> httpx.Response:
        async with gateway.client() as http:
            return await http.get(path)

    gateway = StubGateway()
    for path in ("/tokenizer_info", "/tokenizer_info?model=chat"):
        answer = asyncio.run(get(gateway, path))
        assert answer.json() == {"tokenizer_class": "Stub", "eos_token": "</s>", "bos_token": None}
        assert answer.headers["x-shoal-model-version"] == "tiny@3"
    assert asyncio.run(get(gateway, "/tokenizer_info?model=nobody")).status_code == 404


def test_messages_are_tokenized_as_their_request_says() -> None:
    gateway = StubGateway()
    messages = [{"role": "user", "content": "a b"}]
    for fields, options in (
        ({}, {}),
        ({"add_generation_prompt": False}, {"no_generation_prompt": True}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"chat_template_kwargs": {"thinking": 1}}, {"arguments": {"thinking": 1}}),
    ):
        assert post(gateway, "/tokenize", model="chat", messages=messages, **fields).status_code == 200
        assert gateway.backend.requests[-1]["template"] == options
    post(gateway, "/tokenize", model="chat", messages=messages, add_special_tokens=True)
    assert gateway.backend.requests[-1]["special_tokens"] is True
