"""Every request has an id that its answer, the log, the metrics and the replica know; and a deadline."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from serve_apps.http.log import requests_logger
from tests.serve_apps.gateway.test_access import KEY, ring
from tests.serve_apps.gateway_process import running_gateway
from tests.serve_apps.stub_gateway import RawRequest, StubGateway, until

COMPLETIONS = "/v1/completions"
FIELDS = {
    *("time", "request_id", "endpoint", "method", "status", "app", "tenant", "stream"),
    *("prompt_tokens", "completion_tokens", "replicas", "model_version"),
    *("seconds", "first_token_s", "output_token_s", "error"),
}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": "a b", "max_tokens": 3, **changes}


class Lines(logging.Handler):
    """The request lines of one test."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(json.loads(record.getMessage()))


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    handler, level = Lines(), requests_logger.level
    requests_logger.addHandler(handler)
    requests_logger.setLevel(logging.INFO)
    yield handler.all
    requests_logger.removeHandler(handler)
    requests_logger.setLevel(level)


def send(gateway: StubGateway, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    """The answers to (method, path, options) one after the other."""

    async def go() -> list[httpx.Response]:
        async with gateway.client() as http:
            return [await http.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(go())


@pytest.mark.parametrize("given", ["a", "trace 1/2 {x}", '"\\', "z" * 128])
def test_an_id_that_a_client_gives_is_in_the_answer_the_log_and_the_replica(
    given: str, lines: list[dict[str, Any]]
) -> None:
    gateway = StubGateway()
    headers = {"x-request-id": given}
    for stream in (False, True):
        (answer,) = send(gateway, ("POST", COMPLETIONS, {"json": body(stream=stream), "headers": headers}))
        assert answer.headers["x-request-id"] == given
        assert lines[-1]["request_id"] == given
    first, second = (request["request_id"] for request in gateway.backend.requests)
    # Two clients may give the same id at the same time; the engine takes each id once.
    assert first != second
    assert re.fullmatch(re.escape(given) + "-[0-9a-f]{8}-0", first)
    assert re.fullmatch(
        r"cmpl-[0-9a-f]{32}", send(gateway, ("POST", COMPLETIONS, {"json": body()}))[0].json()["id"]
    )


@pytest.mark.parametrize("given", [None, "", "é", "a\tb", "z" * 129])
def test_an_id_that_cannot_be_one_is_replaced(given: str | None, lines: list[dict[str, Any]]) -> None:
    headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
    answers = send(StubGateway(), *[("GET", "/v1/models", {"headers": headers})] * 2)
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    assert [line["request_id"] for line in lines] == ids


def test_a_line_tells_of_each_request_and_never_a_key_or_a_prompt(lines: list[dict[str, Any]]) -> None:
    gateway = StubGateway(ring(apps=["chat"]))
    headers = {"authorization": f"Bearer {KEY}"}
    prompt = body(prompt="confidential words")
    chat = {"model": "chat", "messages": [{"role": "user", "content": "confidential"}], "max_tokens": 2}
    send(
        gateway,
        ("POST", COMPLETIONS, {"json": prompt, "headers": headers}),
        ("POST", "/v1/chat/completions", {"json": {**chat, "stream": True}, "headers": headers}),
        ("POST", "/v1/embeddings", {"json": {"model": "chat", "input": ["a b", "c"]}, "headers": headers}),
        ("POST", "/tokenize", {"json": {"model": "chat", "prompt": "a b"}, "headers": headers}),
        ("POST", COMPLETIONS, {"json": body(model="nobody"), "headers": headers}),
        ("POST", COMPLETIONS, {"json": body(max_tokens=-1), "headers": headers}),
        ("POST", COMPLETIONS, {"json": prompt, "headers": {"authorization": "Bearer sk-mine"}}),
        ("GET", "/v1/models/chat", {"headers": headers}),
        ("GET", "/nothing", {}),
        ("GET", "/v1/completions", {}),
        ("GET", "/ready", {}),
        ("GET", "/health", {}),
        ("GET", "/metrics", {}),
    )
    told = [(line["endpoint"], line["method"], line["status"], line["app"], line["error"]) for line in lines]
    assert told == [
        (COMPLETIONS, "POST", 200, "chat", None),
        ("/v1/chat/completions", "POST", 200, "chat", None),
        ("/v1/embeddings", "POST", 200, "chat", None),
        ("/tokenize", "POST", 200, "chat", None),
        (COMPLETIONS, "POST", 404, None, "model_not_found"),
        (COMPLETIONS, "POST", 400, None, "invalid_value"),
        (COMPLETIONS, "POST", 401, None, "invalid_api_key"),
        ("/v1/models/{model}", "GET", 200, None, None),
        (None, "GET", 404, None, "not_found"),
        (COMPLETIONS, "GET", 405, None, "method_not_allowed"),
        ("/ready", "GET", 503, None, "not_ready"),
        ("/metrics", "GET", 401, None, "invalid_api_key"),
    ]
    assert all(line.keys() == FIELDS for line in lines)
    whole, chatted, embedded, tokenized, *_ = lines
    assert (whole["prompt_tokens"], whole["completion_tokens"], whole["stream"]) == (2, 3, False)
    assert (whole["replicas"], whole["model_version"], whole["tenant"]) == (["replica-1"], "tiny@3", "ours")
    assert 0 < whole["first_token_s"] <= whole["seconds"] < 5
    assert datetime.fromisoformat(whole["time"]).utcoffset() is not None
    assert (chatted["stream"], chatted["completion_tokens"]) == (True, 2)
    assert (whole["output_token_s"], embedded["output_token_s"]) == (None, None)
    assert chatted["first_token_s"] + chatted["output_token_s"] <= chatted["seconds"]
    assert (embedded["prompt_tokens"], embedded["completion_tokens"]) == (3, None)
    assert (tokenized["prompt_tokens"], tokenized["replicas"]) == (None, ["replica-5"])
    shown = json.dumps(lines)
    for secret in (KEY, "sk-mine", "confidential"):
        assert secret not in shown


def test_aborted_and_broken_streams_are_told_of(lines: list[dict[str, Any]]) -> None:
    async def go() -> None:
        gateway = StubGateway()
        gateway.backend.gate.clear()
        gateway.backend.tokens_before_gate = 1
        for stream in (True, False):
            raw = RawRequest(gateway.api, COMPLETIONS, body(stream=stream))
            await until(lambda: gateway.backend.running == 1)
            if stream:
                await until(lambda raw=raw: raw.sent.qsize() >= 2)
            raw.go_away()
            await raw.task
        gateway.backend.gate.set()
        gateway.backend.script = [2]
        async with gateway.client() as http:
            await http.post(COMPLETIONS, json=body(stream=True))

    asyncio.run(go())
    assert [(line["status"], line["error"], line["stream"], line["completion_tokens"]) for line in lines] == [
        (499, None, True, 1),
        (499, None, False, 1),
        (200, "replica_lost", True, 2),
    ]


def test_metrics_count_every_endpoint_and_show_ids_to_whoever_reads_openmetrics() -> None:
    gateway = StubGateway()
    send(
        gateway,
        ("POST", COMPLETIONS, {"json": body(), "headers": {"x-request-id": "r" * 128}}),
        ("POST", "/v1/embeddings", {"json": {"model": "chat", "input": ["a b", "c"]}}),
        ("POST", "/v1/embeddings", {"json": {"model": "chat", "input": "a " * 100}}),
        ("POST", "/tokenize", {"json": {"model": "chat", "prompt": "a b c d"}}),
        ("POST", "/detokenize", {"json": {"model": "chat", "tokens": [1, 2]}}),
        ("GET", "/v1/models/chat", {}),
        ("GET", "/v1/nothing/7", {}),
    )
    plain, opened = send(
        gateway,
        ("GET", "/metrics", {}),
        (
            "GET",
            "/metrics",
            {"headers": {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}},
        ),
    )
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        'requests_total{app="chat",endpoint="/v1/embeddings",status="200"} 1.0',
        'requests_total{app="chat",endpoint="/v1/embeddings",status="400"} 1.0',
        'requests_total{app="chat",endpoint="/tokenize",status="200"} 1.0',
        'requests_total{app="chat",endpoint="/detokenize",status="200"} 1.0',
        'requests_total{app="",endpoint="/v1/models/{model}",status="200"} 1.0',
        'requests_total{app="",endpoint="",status="404"} 1.0',
        'errors_total{app="chat",code="context_length_exceeded"} 1.0',
        'request_seconds_count{app="chat",endpoint="/v1/embeddings"} 2.0',
        'request_seconds_count{app="chat",endpoint="/detokenize"} 1.0',
        'tokens_total{app="chat",kind="prompt"} 5.0',
        'tokens_total{app="chat",kind="tokenized"} 6.0',
    ):
        assert f"shoal_gateway_{line}" in plain.text
    assert "request_id" not in plain.text
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    exemplars: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(opened.text):
        for sample in family.samples:
            if sample.exemplar and sample.labels.get("endpoint") == COMPLETIONS:
                exemplars.setdefault(family.name, set()).add(sample.exemplar.labels["request_id"])
    # OpenMetrics allows an exemplar 128 characters, name and value together.
    longest = {"r" * 118}
    assert exemplars == {
        "shoal_gateway_request_seconds": longest,
        "shoal_gateway_first_token_seconds": longest,
    }


def test_the_time_between_tokens_is_counted_from_the_first_to_the_last(lines: list[dict[str, Any]]) -> None:
    gateway = StubGateway()
    gateway.backend.tokens_before_gate = 1

    async def go() -> str:
        gateway.backend.gate.clear()
        request = RawRequest(gateway.api, COMPLETIONS, body(stream=True, max_tokens=4))
        await request.sent.get()
        await asyncio.sleep(0.9)
        gateway.backend.gate.set()
        await request.task
        async with gateway.client() as http:
            return (await http.get("/metrics")).text

    metrics = asyncio.run(go())
    assert 0.3 <= lines[0]["output_token_s"] < 0.9  # three of them in the pause
    assert lines[0]["first_token_s"] < 0.9
    labels = 'app="chat",endpoint="/v1/completions"'
    for bound, count in (("0.2", 0), ("1.0", 1)):
        bucket = f'shoal_gateway_output_token_seconds_bucket{{{labels},le="{bound}"}} {count}.0'
        assert bucket in metrics


POSTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, body()),
    (COMPLETIONS, body(stream=True)),
    ("/v1/embeddings", {"model": "chat", "input": "a"}),
    ("/tokenize", {"model": "chat", "prompt": "a"}),
    ("/detokenize", {"model": "chat", "tokens": [1]}),
]


@pytest.mark.parametrize(
    "given", ["", "0", "-1", "nan", "inf", "1e999", "5 s", "1_0", "0x5", "5,5", "x" * 100]
)
@pytest.mark.parametrize(("path", "document"), POSTS)
def test_a_deadline_that_is_none_is_refused_by_name(given: str, path: str, document: dict[str, Any]) -> None:
    gateway = StubGateway()
    headers = {"x-request-timeout-s": given}
    (answer,) = send(gateway, ("POST", path, {"json": document, "headers": headers}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout-s")
    assert not gateway.backend.requests


@pytest.mark.parametrize("given", ["50", "60.5", "5e1", ".5e2", "+50", "1000000"])
def test_a_deadline_that_is_met_changes_nothing(given: str) -> None:
    headers = {"x-request-timeout-s": given}
    requests = [("POST", path, {"json": document, "headers": headers}) for path, document in POSTS]
    assert [answer.status_code for answer in send(StubGateway(), *requests)] == [200] * len(POSTS)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("given", "allowed", "used"), [("0.1", 5.0, "0.1"), ("60", 0.1, "0.1"), ("1e-9", 5, "1e-09")]
)
def test_the_smaller_of_the_clients_and_the_apps_time_ends_the_work(
    stream: bool, given: str, allowed: float, used: str
) -> None:
    async def go() -> None:
        gateway = StubGateway(request_timeout_s=allowed)
        gateway.backend.gate.clear()
        headers = {"x-request-timeout-s": given}
        async with gateway.client() as http, asyncio.timeout(4):
            answer = await http.post(COMPLETIONS, json=body(stream=stream), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
            assert answer.json()["error"]["message"] == f"The request was not done after {used} s."
            assert gateway.backend.running == 0
            gateway.backend.tokens_before_gate = 2
            if stream and given != "1e-9":
                begun = await http.post(COMPLETIONS, json=body(stream=True), headers=headers)
                assert begun.status_code == 200
                last = [line for line in begun.text.splitlines() if line][-1]
                assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
                assert f"after {used} s" in last
                assert gateway.backend.running == 0
        assert 'in_flight{app="chat"} 0.0' in gateway.service.metrics.text().decode() or given == "1e-9"

    asyncio.run(go())


def test_the_time_of_an_embedding_ends_its_work() -> None:
    async def go() -> None:
        gateway = StubGateway()
        stopped = asyncio.Event()

        async def never(*_: Any) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()

        gateway.backend.ask = never  # type: ignore[method-assign]
        async with gateway.client() as http, asyncio.timeout(4):
            answer = await http.post(
                "/v1/embeddings",
                json={"model": "chat", "input": "a"},
                headers={"x-request-timeout-s": "0.05"},
            )
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert stopped.is_set()
        assert 'in_flight{app="chat"} 0.0' in gateway.service.metrics.text().decode()

    asyncio.run(go())


def test_time_that_passes_before_an_app_is_found_counts() -> None:
    async def go() -> None:
        gateway = StubGateway()
        gateway.service.table = None

        async def late() -> Any:
            await asyncio.sleep(60)

        gateway.service.refresh = late
        async with gateway.client() as http, asyncio.timeout(4):
            answer = await http.post(COMPLETIONS, json=body(), headers={"x-request-timeout-s": "0.05"})
        assert answer.status_code == 504
        assert not gateway.backend.requests

    asyncio.run(go())


@pytest.mark.parametrize(
    ("given", "status"),
    [("application/json; charset=utf-8", 200), ("Application/JSON", 200), ("text/plain", 415), ("", 415)],
)
def test_a_body_that_is_said_to_be_something_else_than_json_is_refused(given: str, status: int) -> None:
    headers = {"content-type": given}
    (answer,) = send(
        StubGateway(), ("POST", COMPLETIONS, {"content": json.dumps(body()), "headers": headers})
    )
    assert answer.status_code == status
    if status == 415:
        assert answer.json()["error"]["code"] == "unsupported_media_type"


def test_what_the_process_logs_is_json_with_the_requests_id(tmp_path: Path) -> None:
    with running_gateway(tmp_path, warming=True) as gateway, httpx.Client(base_url=gateway.url) as http:
        http.post(COMPLETIONS, json=body(), headers={"x-request-id": "good"})
        broken = http.post(COMPLETIONS, json=body(prompt="fail"), headers={"x-request-id": "bad"})
        assert (broken.status_code, broken.headers["x-request-id"]) == (500, "bad")
        line = gateway.logged(request_id="good")
        assert (line["status"], line["completion_tokens"]) == (200, 3)
        assert gateway.logged(request_id="bad", status=500)["error"] == "internal_error"
        failure = gateway.logged(request_id="bad", level="ERROR")
        assert "RuntimeError: the backend broke" in failure["traceback"]
        assert [one for one in gateway.state()["ids"] if one.startswith("good-")]
        assert {one["request_id"] for one in gateway.lines()} == {"good", "bad"}
