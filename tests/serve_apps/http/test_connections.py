"""Clients that send nonsense, send or read slowly, leave, or are many: real sockets, the real server."""

from __future__ import annotations

import json
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve_apps.gateway_process import RunningGateway, running_gateway

PATH = "/v1/completions"
CONNECTION, BODY = "serve_apps.http.connection", "serve_apps.http.body"
BOUNDS = "serve_apps.http.message_bounds"
SHORT = {
    f"{BOUNDS}.HEAD_S": 1.0,
    f"{BOUNDS}.REST_S": 1.0,
    "serve_apps.http.lingering.LINGER_S": 0.5,
    f"{CONNECTION}.STALLED_S": 2.0,
    f"{BODY}.BODY_S": 1.0,
    "serve_apps.http.server.CHECK_EVERY_S": 0.1,
}
LIMITS = {"max_tokens": 100_000, "queue": 2000, "request_timeout_s": 60.0}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway whose patience is short."""
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(folder, constants=SHORT, limits=LIMITS) as running:
        yield running


def request(prompt: str = "a", *, close: bool = False, **fields: Any) -> bytes:
    """A POST as it goes over the wire."""
    body = json.dumps({"model": "chat", "prompt": prompt, "max_tokens": 3, **fields}).encode()
    headers = f"Host: gateway\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    headers += "Connection: close\r\n" if close else ""
    return f"POST {PATH} HTTP/1.1\r\n{headers}\r\n".encode() + body


def read_all(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def refusal(answer: bytes) -> tuple[int, str]:
    """Status and code of an answer that is an error in OpenAI's shape, with an id."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: " in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def assert_serves(gateway: RunningGateway) -> None:
    body = {"model": "chat", "prompt": "a"}
    assert httpx.post(gateway.url + PATH, json=body, timeout=20).status_code == 200


def assert_idle(gateway: RunningGateway) -> None:
    gateway.wait_for(lambda state: state["running"] == 0)
    assert_serves(gateway)


def settled_files(gateway: RunningGateway) -> int:
    """Open files and sockets, without connections that are just being closed."""
    counts = []
    for _ in range(20):
        counts.append(gateway.open_files())
        time.sleep(0.02)
    return min(counts)


def flood(client: socket.socket, part: bytes, pause_s: float = 0.0) -> None:
    """Send until the server has closed the connection, which must be soon."""
    end = time.monotonic() + 15
    try:
        while time.monotonic() < end:
            client.sendall(part)
            time.sleep(pause_s)
    except ConnectionError:
        return
    raise AssertionError("the server still takes what is sent")


# Nonsense


def random_connections(gateway: RunningGateway, number: int, seed: int) -> set[int]:
    """The statuses that random bytes, and requests with random damage, are answered with."""
    generator = random.Random(seed)
    statuses = set()
    for _ in range(number):
        data = bytearray(request())
        kind = generator.randrange(3)
        if kind == 0:
            data = bytearray(generator.randbytes(generator.randrange(1, 2000)))
        else:
            for _ in range(generator.randrange(1, 6)):
                at = generator.randrange(len(data))
                data[at : at + generator.randrange(3)] = generator.randbytes(generator.randrange(3))
        with gateway.connect() as client:
            try:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                answer = read_all(client)
            except ConnectionError:
                continue  # it was closed before it had sent all
        answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        if answer:
            statuses.add(int(answer.split()[1]))
    return statuses


def test_random_bytes_and_damaged_requests_are_refused_or_served(gateway: RunningGateway) -> None:
    statuses = random_connections(gateway, 600, seed=1)
    assert {200, 400} <= statuses
    assert not [status for status in statuses if status >= 500]
    assert_idle(gateway)


@pytest.mark.slow
def test_ten_thousand_connections_of_random_bytes(gateway: RunningGateway) -> None:
    assert not [status for status in random_connections(gateway, 10_000, seed=2) if status >= 500]
    assert_idle(gateway)


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, 400, "invalid_http"),
        (b"hello\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_http"),
        (b"CONNECT gateway:443 HTTP/1.1\r\nHost: gateway:443\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * 2**20 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", 431, "headers_too_large"),
        (b"GET /" + b"x" * 2**20 + b" HTTP/1.1\r\n\r\n", 431, "headers_too_large"),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_http"),
        (
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 2**20,
            431,
            "headers_too_large",
        ),
        (request().replace(b"Content-Length: ", b"Content-Length: 99999999999"), 413, "request_too_large"),
    ],
    ids=["TLS", "words", "version", "CONNECT", "1 MB", "many", "long path", "chunk", "extension", "413"],
)
def test_what_is_no_request_that_can_be_served_is_refused(
    gateway: RunningGateway, sent: bytes, status: int, code: str
) -> None:
    with gateway.connect() as client:
        client.sendall(sent)
        assert refusal(read_all(client)) == (status, code)
    gateway.logged(status=status, error=code)
    assert_serves(gateway)


def test_a_refusal_is_told_however_often_connections_are_checked(tmp_path: Path) -> None:
    with running_gateway(tmp_path, constants={"serve_apps.http.server.CHECK_EVERY_S": 0.0}) as gateway:
        for _ in range(10):
            with gateway.connect() as client:
                client.sendall(b"hello\r\n\r\n")
                assert refusal(read_all(client)) == (400, "invalid_http")


def test_an_endless_header_is_cut_off(gateway: RunningGateway) -> None:
    before = gateway.memory_bytes()
    with gateway.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: ")
        flood(client, b"x" * 65536)
    # Sockets' buffers take some megabytes, and for a moment the rest is thrown away.
    assert gateway.memory_bytes() - before < 16 * 2**20
    assert_serves(gateway)


def test_a_body_that_is_refused_while_it_is_sent_lets_the_client_read_why(gateway: RunningGateway) -> None:
    body = b'{"model": "chat", "prompt": "' + b"x" * 2**20
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n"
    with gateway.connect() as client:
        client.sendall(head + body)
        assert refusal(read_all(client)) == (413, "request_too_large")


# Slow senders


@pytest.mark.parametrize(
    ("begun", "each"),
    [
        (b"", b"G"),
        (b"GET /health HTTP/1.1\r\n", b"X: y\r\n"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n", b"{"),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    ],
    ids=["line", "headers", "body", "chunks"],
)
def test_who_sends_a_request_too_slowly_gets_408(gateway: RunningGateway, begun: bytes, each: bytes) -> None:
    with gateway.connect() as client:
        began = time.monotonic()
        client.sendall(begun or each)
        while not select.select([client], [], [], 0.2)[0] and time.monotonic() - began < 10:
            # A request line is one word, of which no more may come than makes sense.
            client.sendall(each if begun else b"")
        assert refusal(read_all(client)) == (408, "request_timeout")
        assert 0.9 < time.monotonic() - began < 5
    assert_serves(gateway)


def test_a_body_that_never_ends_is_not_waited_for_after_its_answer(gateway: RunningGateway) -> None:
    with gateway.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
        flood(client, b"x", pause_s=0.05)


def test_a_body_may_take_its_time_while_it_comes(gateway: RunningGateway) -> None:
    sent = request("word " * 4000, max_tokens=1)
    with gateway.connect() as client:
        began = time.monotonic()
        for start in range(0, len(sent), 2000):
            client.sendall(sent[start : start + 2000])
            time.sleep(0.2)
        assert time.monotonic() - began > 1.5  # more than an empty body gets
        assert client.recv(100).startswith(b"HTTP/1.1 400")  # longer than the model's context
    assert_serves(gateway)


# Half-closed connections, and clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_sends_no_more_is_still_answered(gateway: RunningGateway, stream: bool) -> None:
    with gateway.connect() as client:
        client.sendall(request("every:0.3", stream=stream))
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"data: [DONE]" in answer if stream else b'"completion_tokens":3' in answer
    assert_idle(gateway)


def test_a_client_that_ends_in_the_middle_of_its_body_is_let_go(gateway: RunningGateway) -> None:
    with gateway.connect() as client:
        client.sendall(request()[:-5])
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half, then close"])
def test_the_work_of_a_client_that_has_left_is_stopped(
    gateway: RunningGateway, stream: bool, how: str
) -> None:
    """Without a stream nothing would be written for a minute, which is when it shows that nobody reads."""
    client = gateway.connect()
    client.sendall(request("every:0.2" if stream else "every:50", stream=stream, max_tokens=300))
    gateway.wait_for(lambda state: state["running"] == 1)
    if stream:
        client.recv(10)
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half, then close":
        client.shutdown(socket.SHUT_WR)
        time.sleep(0.5)
        assert gateway.state()["running"] == 1
    client.close()
    gateway.wait_for(lambda state: state["running"] == 0, timeout_s=5)
    assert_idle(gateway)


# Pipelines


def test_pipelined_requests_are_answered_in_their_order(gateway: RunningGateway) -> None:
    with gateway.connect() as client:
        client.sendall(b"".join(request("every:0.02", max_tokens=n) for n in (5, 3, 1)) + request(close=True))
        answer = read_all(client)
    used = [
        int(part.split(b"}")[0])
        for part in answer.split(b'"completion_tokens":')[1:]
        for part in [part.split(b",")[0]]
    ]
    assert used == [5, 3, 1, 3]


def test_nonsense_after_a_request_does_not_spoil_its_answer(gateway: RunningGateway) -> None:
    with gateway.connect() as client:
        client.sendall(request("every:0.1", stream=True) + b"\x00nonsense" * 100)
        answer = read_all(client)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert answer.count(b"HTTP/1.1") == 1


def test_no_more_requests_than_a_few_may_wait_in_one_connection(gateway: RunningGateway) -> None:
    with gateway.connect() as client:
        client.sendall(request("every:0.2", max_tokens=1) * 1000)
        answer = read_all(client)
    assert 1 <= answer.count(b"HTTP/1.1 200 OK") <= 16
    assert_idle(gateway)


def test_pipelined_work_is_stopped_when_the_client_leaves(gateway: RunningGateway) -> None:
    client = gateway.connect()
    client.sendall(request("every:50"))
    gateway.wait_for(lambda state: state["running"] == 1)
    # From the next on nothing is read from this connection until the first is answered.
    client.sendall(request("every:50") * 2)
    time.sleep(0.3)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    gateway.wait_for(lambda state: state["running"] == 0, timeout_s=5)
    assert_idle(gateway)


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
def test_an_upgrade_is_not_carried_out(gateway: RunningGateway, upgrade: str) -> None:
    head = f"GET /health HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: {upgrade}\r\n"
    head += "Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with gateway.connect() as client:
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")


# Slow readers


def rate(gateway: RunningGateway, seconds: float) -> float:
    """Tokens a second of one client that reads as fast as it can."""
    count, body = 0, {"model": "chat", "prompt": "every:0.005", "max_tokens": 100_000, "stream": True}
    began = time.monotonic()
    with httpx.stream("POST", gateway.url + PATH, json=body, timeout=20) as answer:
        for line in answer.iter_lines():
            count += bool(line)
            if time.monotonic() - began > seconds:
                break
    return count / seconds


def test_a_client_that_reads_slowly_holds_nobody_up_and_is_kept_little_for(gateway: RunningGateway) -> None:
    alone = rate(gateway, 2)
    before = gateway.memory_bytes()
    slow = []
    # Each stream is 100 MB, of which a client takes 4 KB and then no more.
    sent = request("every:0.005 size:50000", stream=True, max_tokens=2000)
    for _ in range(5):
        client = gateway.connect(receive_buffer=4096)
        client.sendall(sent)
        client.recv(4096)
        slow.append(client)
    most = 0
    beside = []

    def measure() -> None:
        beside.append(rate(gateway, 2))

    other = threading.Thread(target=measure)
    other.start()
    while other.is_alive():
        most = max(most, gateway.memory_bytes() - before)
        time.sleep(0.05)
    # 4 MiB a stream are kept, and the sockets' own buffers are the kernel's.
    assert most < 5 * 8 * 2**20
    print(f"{alone:.0f} tokens/s alone, {beside[0]:.0f} beside slow readers, {most / 2**20:.1f} MiB more")
    assert beside[0] > alone * 0.5
    line = gateway.logged(error="client_too_slow")
    assert (line["status"], line["stream"]) == (200, True)
    gateway.wait_for(lambda state: state["running"] == 0)
    for client in slow:
        client.close()
    assert_idle(gateway)


def test_a_slow_reader_learns_that_its_stream_was_cut(gateway: RunningGateway) -> None:
    with gateway.connect(receive_buffer=4096) as client:
        client.sendall(request("every:0.002 size:50000", stream=True, max_tokens=2000, close=True))
        gateway.wait_for(lambda state: state["running"] == 1)
        gateway.wait_for(lambda state: state["running"] == 0)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        answer = read_all(client)
    events = [event for event in answer.split(b"data: ") if b'"error"' in event]
    assert len(events) == 1
    assert b"client_too_slow" in events[0]
    assert answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_who_takes_nothing_of_an_answer_is_cut_off(tmp_path: Path, stream: bool) -> None:
    with running_gateway(tmp_path, constants=SHORT, limits=LIMITS) as gateway:
        assert_serves(gateway)
        files = settled_files(gateway)
        with gateway.connect(receive_buffer=4096) as client:
            client.sendall(request("size:200000", stream=stream, max_tokens=50, close=True))
            gateway.wait_for(lambda state: state["tokens"] > 10 and state["running"] == 0)
            began = time.monotonic()
            while gateway.open_files() > files:
                assert time.monotonic() - began < 15
                time.sleep(0.05)
            assert time.monotonic() - began > 1
        assert_serves(gateway)


# Many


def test_a_thousand_idle_connections_hinder_nobody_and_leave_nothing(gateway: RunningGateway) -> None:
    assert_serves(gateway)
    files, before = settled_files(gateway), gateway.memory_bytes()
    idle = [gateway.connect() for _ in range(1000)]
    try:
        # Some have asked before, some have begun to ask.
        for client in idle[:200]:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: gateway\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        for client in idle[200:400]:
            client.sendall(b"GET /hea")
        began = time.monotonic()
        with httpx.Client(base_url=gateway.url, timeout=20) as http:
            for _ in range(50):
                assert http.post(PATH, json={"model": "chat", "prompt": "a"}).status_code == 200
        assert time.monotonic() - began < 10
        assert gateway.open_files() - files >= 700
    finally:
        for client in idle:
            client.close()
    end = time.monotonic() + 20
    while gateway.open_files() > files:
        assert time.monotonic() < end, gateway.open_files() - files
        time.sleep(0.1)
    kept = gateway.memory_bytes() - before
    print(f"{kept / 2**20:.1f} MiB kept")
    assert kept < 24 * 2**20
    assert_serves(gateway)


def test_one_connection_too_many_takes_the_place_of_the_one_that_was_idle_for_longest(tmp_path: Path) -> None:
    with running_gateway(tmp_path, constants={"serve_apps.http.crowd.MOST_CONNECTIONS": 3}) as gateway:
        first, second = gateway.connect(), gateway.connect()
        second.sendall(request("every:1", max_tokens=3))
        gateway.wait_for(lambda state: state["running"] == 1)
        third, fourth = gateway.connect(), gateway.connect()
        assert first.recv(1) == b""
        for client in (third, fourth):
            client.sendall(request("every:1", max_tokens=3))
        assert refusal(read_all(gateway.connect())) == (503, "too_many_connections")
        for client in (second, third, fourth):
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            client.close()


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_on_which_no_request_comes_is_closed(tmp_path: Path, sent: bytes) -> None:
    constants = {f"{BOUNDS}.KEEP_ALIVE_S": -4.5, "serve_apps.http.server.CHECK_EVERY_S": 0.1}
    with running_gateway(tmp_path, constants=constants) as gateway, gateway.connect() as client:
        if sent:
            flood(client, sent, pause_s=0.05)
        else:
            assert client.recv(1) == b""
