"""Clients that speak HTTP as other people's do: an older one, hopes for a newer one, odd methods, paths."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from tests.serve_apps.fronted_gateway import FrontedGateway, fronted_gateway
from tests.serve_apps.gateway_process import HOST

PATH = "/v1/completions"
PAGE = "https://page.example"
BODY = {"model": "chat", "prompt": "a", "max_tokens": 3}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontedGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with fronted_gateway(
        folder, gateway={"cors": [PAGE], "metrics_from": ["192.0.2.0/24"]}, keys=["k1"]
    ) as running:
        yield running


def sent(gateway: FrontedGateway, *parts: bytes) -> bytes:
    """All that is answered to what goes over one connection, part by part; the last is to end it."""
    with gateway.connect() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            client.sendall(part)
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    return answer


def post(body: bytes, version: str = "1.1", **headers: str) -> bytes:
    lines = [f"POST {PATH} HTTP/{version}", f"Host: {HOST}", "Authorization: Bearer k1"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join([*lines, f"Content-Length: {len(body)}"]) + "\r\n\r\n").encode() + body


def encoded(**fields: object) -> bytes:
    return json.dumps({**BODY, **fields}).encode()


def curl(gateway: FrontedGateway, *arguments: str, path: str = PATH, body: bytes | None = None) -> str:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("needs curl")
    command = [program, "-sS", "--max-time", "20", "-H", "Authorization: Bearer k1", *arguments]
    command += [] if body is None else ["-H", "Content-Type: application/json", "--data-binary", "@-"]
    done = subprocess.run([*command, gateway.url + path], input=body, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.parametrize("where", [1, 40, 200, None])
def test_a_request_that_would_like_http2_is_answered_in_this_one_with_its_body(
    gateway: FrontedGateway, where: int | None
) -> None:
    asked = post(encoded(), Connection="Upgrade, HTTP2-Settings", Upgrade="h2c", HTTP2_Settings="AAMAAABk")
    after = post(encoded(max_tokens=2), Connection="close")
    both = sent(gateway, asked[:where], asked[where:] if where else b"", after)
    assert both.count(b"HTTP/1.1 200 OK") == 2, both
    assert b'"completion_tokens":3' in both
    assert b'"completion_tokens":2' in both


def test_a_chunked_body_and_a_websocket_are_no_exceptions(gateway: FrontedGateway) -> None:
    body = encoded()
    head = post(b"", Connection="close, Upgrade", Upgrade="h2c").replace(
        b"Content-Length: 0", b"Transfer-Encoding: chunked"
    )
    answer = sent(gateway, head, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    assert b"HTTP/1.1 200 OK" in answer
    asks = f"GET /health HTTP/1.1\r\nHost: {HOST}\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n"
    asks += "Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    assert b'{"status":"ok"}' in sent(gateway, asks.encode())
    assert sent(gateway, b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n").split()[1] == b"400"


def test_curl_may_ask_for_http2(gateway: FrontedGateway) -> None:
    answer = json.loads(curl(gateway, "--http2", body=encoded(prompt="a " * 5000, max_tokens=3)))
    assert answer["error"]["code"] == "context_length_exceeded", "the whole body was read"
    assert json.loads(curl(gateway, "--http2", body=encoded()))["usage"]["completion_tokens"] == 3


def test_a_stream_to_http_1_0_ends_with_the_connection_and_has_no_chunks(gateway: FrontedGateway) -> None:
    answer = sent(gateway, post(encoded(stream=True), version="1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    events = body.split(b"\n\n")
    assert all(event.startswith(b"data: ") for event in events[:-1])
    assert events[-2:] == [b"data: [DONE]", b""]
    whole = sent(gateway, post(encoded(), version="1.0"))
    assert json.loads(whole.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 3
    shown = curl(gateway, "--http1.0", "-N", body=encoded(stream=True))
    assert shown.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "path",
    ["/health", "/v1/models", "/v1/models/chat", "/metrics", "/openapi.json", "/ping", "/version", "/load"],
)
def test_head_is_get_without_a_body(gateway: FrontedGateway, path: str) -> None:
    with httpx.Client(base_url=gateway.url, headers={"Authorization": "Bearer k1"}, timeout=20) as http:
        got, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers.get("content-type") == got.headers.get("content-type")
        if path != "/metrics":
            assert head.headers["content-length"] == str(len(got.content))
        assert http.head(PATH).status_code == 405
        assert http.head("/nowhere").status_code == 404
    if path.startswith("/v1"):  # probes are not logged
        assert gateway.logged(method="HEAD", status=200)["endpoint"].startswith("/v1/models")
    assert "200 OK" in curl(gateway, "-I", path=path)


def test_options_names_the_methods(gateway: FrontedGateway) -> None:
    with httpx.Client(base_url=gateway.url, timeout=20) as http:
        answer = http.options(PATH)
        assert (answer.status_code, answer.headers["allow"]) == (204, "OPTIONS, POST")
        assert http.options("/v1/models").headers["allow"] == "GET, HEAD, OPTIONS"
        assert http.options("/nowhere").status_code == 404


def test_pages_of_origins_that_the_config_names_may_ask(gateway: FrontedGateway) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with httpx.Client(base_url=gateway.url, timeout=20) as http:
        allowed = http.options(PATH, headers={"Origin": PAGE, **asks})
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        refused = http.post(PATH, json=BODY, headers={"Origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE, "a page may read why"
        other = http.options(PATH, headers={"Origin": "https://other.example", **asks})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("path", [f"{PATH}/", f"/{PATH}", "/v1//completions", "//v1///completions//"])
def test_slashes_too_many_do_not_matter(gateway: FrontedGateway, path: str) -> None:
    with gateway.connect() as client:
        client.sendall(post(encoded()).replace(PATH.encode(), path.encode(), 1))
        assert client.recv(15) == b"HTTP/1.1 200 OK"
    assert gateway.logged(endpoint=PATH, status=200)


@pytest.mark.parametrize("name", ["api-key", "x-api-key", "Api-Key", "authorization"])
def test_a_key_may_come_in_other_clients_headers(gateway: FrontedGateway, name: str) -> None:
    value = "Bearer k1" if name == "authorization" else "k1"
    for key, status in ((value, 200), (value + "x", 401)):
        answer = httpx.post(gateway.url + PATH, json=BODY, headers={name: key}, timeout=20)
        assert answer.status_code == status


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
def test_nobody_gets_another_address_by_a_header(gateway: FrontedGateway, header: str) -> None:
    answer = httpx.get(f"{gateway.url}/metrics", headers={header: "192.0.2.1"}, timeout=20)
    assert answer.status_code == 401


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
def test_a_compressed_body_is_refused_by_name(gateway: FrontedGateway, coding: str) -> None:
    answer = sent(gateway, post(b"\x1f\x8b", Content_Encoding=coding, Connection="close"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == b"415"
    error = json.loads(body)["error"]
    assert (error["code"], coding in error["message"]) == ("unsupported_content_encoding", True)
    assert b"HTTP/1.1 200 OK" in sent(
        gateway, post(encoded(), Content_Encoding="identity", Connection="close")
    )
