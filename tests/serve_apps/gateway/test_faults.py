"""What clients see when replicas die, queues fill and time runs out; and what is freed when they leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.serve_apps.event_lines import DONE, data_of
from tests.serve_apps.stub_gateway import RawRequest, StubGateway, until

PATH = "/v1/completions"


def request(**changes: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": "a", "max_tokens": 4, **changes}


def events(body: str) -> list[Any]:
    data = [item for line in body.splitlines() if (item := data_of(line)) is not None]
    return [item if item == DONE else json.loads(item) for item in data]


def test_a_request_whose_replica_died_before_it_sent_anything_is_tried_again() -> None:
    async def go() -> None:
        for stream in (True, False):
            gateway = StubGateway()
            gateway.backend.script = [0, 0, None]
            async with gateway.client() as http:
                answer = await http.post(PATH, json=request(stream=stream))
                assert answer.status_code == 200
                assert answer.headers["x-shoal-replica"].endswith("replica-3")
                assert len(gateway.backend.requests) == 3

    asyncio.run(go())


def test_a_whole_answer_is_tried_again_even_after_tokens_and_holds_none_of_the_lost_ones_twice() -> None:
    async def go() -> None:
        gateway = StubGateway()
        gateway.backend.script = [3, 1, None]
        async with gateway.client() as http:
            answer = (await http.post(PATH, json=request(logprobs=0))).json()
        assert answer["choices"][0]["text"] == " 0 1 2 3"
        assert answer["choices"][0]["logprobs"]["tokens"] == [" 0", " 1", " 2", " 3"]
        assert answer["usage"]["completion_tokens"] == 4

    asyncio.run(go())


def test_a_stream_whose_replica_died_after_tokens_ends_with_an_error_event() -> None:
    async def go() -> None:
        gateway = StubGateway()
        gateway.backend.script = [2, None]
        async with gateway.client() as http:
            answer = await http.post(PATH, json=request(stream=True))
        *parts, last = events(answer.text)
        assert "".join(part["choices"][0]["text"] for part in parts) == " 0"  # " 1" was held back
        assert last["error"]["code"] == "replica_lost"
        assert len(gateway.backend.requests) == 1
        metrics = gateway.service.metrics.text().decode()
        assert 'shoal_gateway_errors_total{app="chat",code="replica_lost"} 1.0' in metrics

    asyncio.run(go())


def test_retries_come_to_an_end() -> None:
    async def go() -> None:
        gateway = StubGateway()
        gateway.backend.script = [0] * 100
        async with gateway.client() as http:
            answer = await http.post(PATH, json=request())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
        assert answer.headers["retry-after"]
        assert 1 < len(gateway.backend.requests) <= 5

    asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_under_which_two_engines_broke_is_not_sent_to_a_third(stream: bool) -> None:
    async def go() -> None:
        gateway = StubGateway()
        gateway.backend.breaks, gateway.backend.script = True, [0, 0, None]
        async with gateway.client() as http:
            answer = await http.post(PATH, json=request(stream=stream))
        # No client sends a 400 again by itself.
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "engines_broke")
        assert len(gateway.backend.requests) == 2
        assert gateway.service.traffic.report()["errors"] in ({}, {"chat 0": 0})

    asyncio.run(go())


def test_a_request_under_which_one_engine_broke_is_tried_again_and_counts_against_its_version() -> None:
    async def go() -> None:
        gateway = StubGateway()
        gateway.backend.breaks, gateway.backend.script = True, [2, None]
        async with gateway.client() as http:
            answer = await http.post(PATH, json=request())
        assert answer.json()["choices"][0]["text"] == " 0 1 2 3"
        report = gateway.service.traffic.report()
        assert (report["requests"], report["errors"]) == ({"chat 0": 2}, {"chat 0": 1})

    asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_is_ended(stream: bool) -> None:
    async def go() -> None:
        gateway = StubGateway(request_timeout_s=0.05)
        gateway.backend.gate.clear()
        async with gateway.client() as http:
            answer = await http.post(PATH, json=request(stream=stream))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert gateway.backend.running == 0

    asyncio.run(go())


def test_a_stream_that_takes_too_long_says_so_in_the_stream() -> None:
    async def go() -> None:
        gateway = StubGateway(request_timeout_s=0.5)
        gateway.backend.gate.clear()
        gateway.backend.tokens_before_gate = 2
        async with gateway.client() as http:
            answer = await http.post(PATH, json=request(stream=True))
        assert answer.status_code == 200
        assert events(answer.text)[-1]["error"]["code"] == "timeout"
        assert gateway.backend.running == 0

    asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 2])
def test_a_client_that_goes_away_frees_its_place(stream: bool, tokens: int) -> None:
    async def go() -> None:
        gateway = StubGateway()
        gateway.backend.gate.clear()
        gateway.backend.tokens_before_gate = tokens
        raw = RawRequest(gateway.api, PATH, request(stream=stream, n=2))
        await until(lambda: gateway.backend.running == 2)
        if stream and tokens:
            await until(lambda: raw.sent.qsize() >= 2)
        raw.go_away()
        async with asyncio.timeout(5):
            await raw.task
        assert gateway.backend.running == 0
        metrics = gateway.service.metrics.text().decode()
        assert 'shoal_gateway_in_flight{app="chat"} 0.0' in metrics
        assert 'shoal_gateway_cancelled_total{app="chat"} 1.0' in metrics

    asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_handler_frees_its_place(stream: bool) -> None:
    """How Ray Serve's proxy tells the gateway that a client is gone."""

    async def go() -> None:
        gateway = StubGateway()
        gateway.backend.gate.clear()
        gateway.backend.tokens_before_gate = 1
        raw = RawRequest(gateway.api, PATH, request(stream=stream))
        await until(lambda: gateway.backend.running == 1)
        if stream:
            await until(lambda: raw.sent.qsize() >= 2)
        raw.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await raw.task
        assert gateway.backend.running == 0
        assert 'in_flight{app="chat"} 0.0' in gateway.service.metrics.text().decode()

    asyncio.run(go())


def test_tokens_reach_the_client_while_the_answer_is_still_made() -> None:
    async def go() -> None:
        gateway = StubGateway()
        gateway.backend.gate.clear()
        gateway.backend.tokens_before_gate = 1
        raw = RawRequest(gateway.api, PATH, request(stream=True))
        async with asyncio.timeout(5):
            start, first = await raw.sent.get(), await raw.sent.get()
        assert start["status"] == 200
        assert b'"text":" 0"' in first["body"]
        assert gateway.backend.running == 1
        gateway.backend.gate.set()
        await raw.task

    asyncio.run(go())


def test_more_requests_than_may_run_and_wait_are_refused_until_places_are_free() -> None:
    async def go() -> None:
        gateway = StubGateway(batch=2, queue=1)
        gateway.backend.gate.clear()
        waiting = [RawRequest(gateway.api, PATH, request()) for _ in range(3)]
        await until(lambda: gateway.backend.running == 3)
        async with gateway.client() as http:
            refused = await http.post(PATH, json=request())
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            gateway.backend.gate.set()
            await asyncio.gather(*(raw.task for raw in waiting))
            assert (await http.post(PATH, json=request())).status_code == 200

    asyncio.run(go())


def test_one_failed_choice_ends_the_others() -> None:
    async def go() -> None:
        gateway = StubGateway()
        gateway.backend.gate.clear()
        gateway.backend.tokens_before_gate = 3
        gateway.backend.script = [None, 2, None]
        raw = RawRequest(gateway.api, PATH, request(stream=True, n=3))
        async with asyncio.timeout(5):
            await raw.task
        assert gateway.backend.running == 0

    asyncio.run(go())
