"""A stream that waits is sent comments: proxies keep it, clients pass them over, another replica may come."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.hosts.endpoints import free_port
from serve_apps.gateway.options import GatewayOptions
from serve_apps.http.event_stream import SILENCE
from tests.serve_apps.gateway_process import HOST, RunningGateway, running_gateway
from tests.serve_apps.stub_gateway import RawRequest, StubGateway, until

SOON_S = 0.05
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
PATH = "/v1/completions"
BODY = {"model": "chat", "prompt": "a b", "max_tokens": 4, "stream": True}


def waiting_gateway(keepalive_s: float = SOON_S, tokens: int = 0, **limits: Any) -> StubGateway:
    """A gateway whose replicas stop after so many tokens, until its gate is opened."""
    gateway = StubGateway(options=GatewayOptions(keepalive_s=keepalive_s), **limits)
    gateway.backend.gate.clear()
    gateway.backend.tokens_before_gate = tokens
    return gateway


async def received(request: RawRequest) -> tuple[dict[str, Any], bytes]:
    """The start of the answer and its whole body."""
    await request.task
    start, *parts = [request.sent.get_nowait() for _ in range(request.sent.qsize())]
    return start, b"".join(part["body"] for part in parts)


async def comments(request: RawRequest, number: int) -> None:
    """Wait until so many have been sent; nothing else may have."""
    async with asyncio.timeout(10):
        start = await request.sent.get()
        body = b""
        while body.count(SILENCE) < number:
            body += (await request.sent.get())["body"]
    assert body == SILENCE * body.count(SILENCE)
    request.sent.put_nowait(start)


def texts(body: bytes) -> list[str]:
    events = [event for event in body.split(b"\n\n") if event and not event.startswith(b":")]
    assert events[-1] == b"data: [DONE]"
    return [json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]]


def test_a_stream_without_a_token_is_begun_and_kept_alive() -> None:
    gateway = waiting_gateway()

    async def go() -> None:
        request = RawRequest(gateway.api, PATH, BODY)
        began = time.monotonic()
        await comments(request, 3)
        assert time.monotonic() - began >= 3 * SOON_S
        gateway.backend.gate.set()
        start, body = await received(request)
        assert start["status"] == 200
        assert "".join(texts(body)) == " 0 1 2 3"

    asyncio.run(go())


def test_another_replica_takes_over_what_has_been_sent_comments_only() -> None:
    gateway = waiting_gateway()
    gateway.backend.script = [0]
    gateway.backend.tokens_before_gate = 0

    async def go() -> None:
        lost = asyncio.Event()
        generate = gateway.backend.generate

        async def late(application: str, request: Any) -> Any:
            if not lost.is_set():
                await lost.wait()
            async for item in generate(application, request):
                yield item

        gateway.backend.generate = late  # type: ignore[method-assign]
        request = RawRequest(gateway.api, PATH, BODY)
        await comments(request, 2)
        lost.set()
        await comments(request, 2)
        gateway.backend.gate.set()
        _, body = await received(request)
        assert "".join(texts(body)) == " 0 1 2 3"
        assert len(gateway.backend.requests) == 2

    asyncio.run(go())


@pytest.mark.parametrize(
    ("fails", "code"), [("lost", "replica_lost"), ("time", "timeout"), ("raises", "internal_error")]
)
def test_an_error_after_a_comment_is_an_event(fails: str, code: str) -> None:
    gateway = waiting_gateway(request_timeout_s=0.5 if fails == "time" else 5.0)

    async def go() -> None:
        failed = asyncio.Event()

        async def broken(application: str, request: Any) -> Any:
            await failed.wait()
            if fails == "raises":
                raise RuntimeError("a mistake of ours")
            async for item in generate(application, request):
                yield item

        generate = gateway.backend.generate
        gateway.backend.generate = broken  # type: ignore[method-assign]
        gateway.backend.script = [0] * 4
        request = RawRequest(gateway.api, PATH, BODY)
        await comments(request, 2)
        if fails != "time":
            failed.set()
        start, body = await received(request)
        assert start["status"] == 200
        *silence, last = [event for event in body.split(b"\n\n") if event]
        assert set(silence) <= {SILENCE.strip()}
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code

    asyncio.run(go())


def test_gaps_between_tokens_are_filled_and_nothing_else_is() -> None:
    gateway = waiting_gateway(tokens=2)

    async def go() -> None:
        request = RawRequest(gateway.api, PATH, BODY)
        await until(lambda: request.sent.qsize() >= 6)
        gateway.backend.gate.set()
        start, body = await received(request)
        assert b"x-shoal-replica" in dict(start["headers"]), "its replica was known when it began"
        before, _, after = body.partition(SILENCE)
        assert before.count(b"data: ") >= 1
        assert body.endswith(b"data: [DONE]\n\n")
        assert "".join(texts(before + after)) == " 0 1 2 3"

    asyncio.run(go())


@pytest.mark.parametrize("options", [GatewayOptions(keepalive_s=0), GatewayOptions()])
def test_nothing_is_sent_early_where_none_are_wanted_or_the_answer_is_no_stream(
    options: GatewayOptions,
) -> None:
    async def go() -> None:
        for stream in (True, False) if options.keepalive_s == 0 else (False,):
            gateway = waiting_gateway(SOON_S if options.keepalive_s else 0)
            request = RawRequest(gateway.api, PATH, {**BODY, "stream": stream})
            await until(lambda gateway=gateway: gateway.backend.running == 1)
            await asyncio.sleep(4 * SOON_S)
            assert request.sent.empty()
            gateway.backend.gate.set()
            _, body = await received(request)
            assert SILENCE not in body

    asyncio.run(go())


def test_an_error_that_comes_soon_has_its_status() -> None:
    gateway = waiting_gateway(keepalive_s=5.0)

    async def go() -> None:
        async with gateway.client() as http:
            gateway.backend.script = [0] * 4
            assert (await http.post(PATH, json=BODY)).status_code == 503
            assert (await http.post(PATH, json={**BODY, "prompt": "a " * 100})).status_code == 400

    asyncio.run(go())


def test_a_client_that_leaves_while_it_waits_costs_nothing_more() -> None:
    gateway = waiting_gateway()

    async def go() -> None:
        for heard in (0, 2):
            request = RawRequest(gateway.api, PATH, BODY)
            await until(lambda: gateway.backend.running == 1)
            if heard:
                await comments(request, heard)
            request.go_away()
            await request.task
            assert gateway.backend.running == 0
            assert gateway.service.traffic.in_flight == {}

    asyncio.run(go())


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("kept"), gateway={"keepalive_s": 0.2}) as running:
        yield running


def test_openais_client_passes_comments_over(gateway: RunningGateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=20)
    chunks = list(client.completions.create(model="chat", prompt="every:0.5 x", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "xxx"
    assert chunks[-1].choices[0].finish_reason == "length"
    stream = client.completions.create(
        model="chat", prompt="every:9 x", stream=True, extra_headers={"x-request-timeout-s": "0.5"}
    )
    with pytest.raises(openai.APIError) as failed:
        next(stream)
    assert failed.value.code == "timeout"


@pytest.mark.parametrize("version", [pytest.param("1.0", marks=pytest.mark.slow), "1.1"])
def test_a_socket_is_never_silent_for_long(gateway: RunningGateway, version: str) -> None:
    body = json.dumps({**BODY, "prompt": "every:1.5 x", "max_tokens": 2}).encode()
    head = f"POST {PATH} HTTP/{version}\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    with gateway.connect() as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer, silences, last = b"", [], time.monotonic()
        while b"[DONE]" not in answer:
            piece = client.recv(65536)
            assert piece, answer
            silences.append(time.monotonic() - last)
            last, answer = time.monotonic(), answer + piece
    assert max(silences) < 1.4
    assert answer.count(SILENCE) >= 4
    assert b"200 OK" in answer.splitlines()[0]


@contextmanager
def nginx(folder: Path, upstream: int) -> Iterator[str]:
    """The URL of an nginx before a gateway, which gives an answer up after a second of silence."""
    assert NGINX is not None
    port = free_port(HOST)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    server = f"server {{ listen {HOST}:{port}; location / {{ proxy_pass http://{HOST}:{upstream};"
    server += " proxy_http_version 1.1; proxy_read_timeout 1s; } }"
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;"
        f" events {{}} http {{ access_log off; {temporary} {server} }}"
    )
    process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        end = time.monotonic() + 10
        while socket.socket().connect_ex((HOST, port)):
            assert process.poll() is None, (folder / "error.log").read_text()
            assert time.monotonic() < end
            time.sleep(0.02)
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian's package nginx)")
@pytest.mark.parametrize("keepalive_s", [0.3, 0])
def test_nginx_keeps_a_stream_that_waits_only_with_comments(keepalive_s: float, tmp_path: Path) -> None:
    with (
        running_gateway(tmp_path, gateway={"keepalive_s": keepalive_s}) as behind,
        nginx(tmp_path, behind.port) as url,
    ):
        body = {**BODY, "prompt": "every:1.5 x", "max_tokens": 2}
        answer = httpx.post(f"{url}{PATH}", json=body, timeout=20)
    if keepalive_s:
        assert "".join(texts(answer.content)) == "xx"
    else:
        assert answer.status_code == 504
