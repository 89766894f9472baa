"""Clients that send nonsense, send or read slowly, leave, or are many: real sockets, the real servers."""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_apps.front.haproxy_config import BUFFER_BYTES
from tests.serve_apps.fronted_gateway import FrontedGateway, fronted_gateway
from tests.serve_apps.gateway_process import HOST

PATH = "/v1/completions"
SHORT = {"request_s": 1.0, "stalled_s": 2.0, "connections": 3000}
LIMITS = {"max_tokens": 100_000, "queue": 2000, "request_timeout_s": 60.0}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontedGateway]:
    """One behind a front whose patience is short."""
    folder = tmp_path_factory.mktemp("gateway")
    with fronted_gateway(folder, SHORT, limits=LIMITS) as running:
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
    """Status and code of an answer that is an error in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def assert_serves(gateway: FrontedGateway) -> None:
    body = {"model": "chat", "prompt": "a"}
    assert httpx.post(gateway.url + PATH, json=body, timeout=20).status_code == 200


def assert_idle(gateway: FrontedGateway) -> None:
    gateway.wait_for(lambda state: state["running"] == 0)
    assert_serves(gateway)


def settled_files(gateway: FrontedGateway) -> int:
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


def damaged(generator: random.Random) -> bytes:
    """Random bytes, or a request with random damage."""
    if generator.randrange(3) == 0:
        return generator.randbytes(generator.randrange(1, 2000))
    data = bytearray(request(close=True))
    for _ in range(generator.randrange(1, 6)):
        at = generator.randrange(len(data))
        data[at : at + generator.randrange(3)] = generator.randbytes(generator.randrange(3))
    return bytes(data)


def random_connections(gateway: FrontedGateway, number: int, seed: int) -> set[int]:
    """The statuses that they are answered with."""
    generator = random.Random(seed)

    def answered(sent: bytes) -> int | None:
        with gateway.connect() as client, contextlib.suppress(ConnectionError):
            client.sendall(sent)
            answer = client.recv(65536)
            return int(answer.split()[1]) if answer else None
        return None  # it was closed before it had sent all

    with ThreadPoolExecutor(50) as side_by_side:  # what is not whole is waited for
        found = side_by_side.map(answered, [damaged(generator) for _ in range(number)])
        return {status for status in found if status is not None}


def test_random_bytes_and_damaged_requests_are_refused_or_served(gateway: FrontedGateway) -> None:
    statuses = random_connections(gateway, 600, seed=1)
    assert {200, 400} <= statuses
    assert not [status for status in statuses if status >= 500]
    assert_idle(gateway)


@pytest.mark.slow
def test_ten_thousand_connections_of_random_bytes(gateway: FrontedGateway) -> None:
    assert not [status for status in random_connections(gateway, 10_000, seed=2) if status >= 500]
    assert_idle(gateway)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
        b"hello\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 2**17 + b"\r\n\r\n",
        b"GET /" + b"x" * 2**17 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["TLS", "words", "header", "path", "chunk"],
)
def test_what_is_no_request_is_refused(gateway: FrontedGateway, sent: bytes) -> None:
    # Who still sends what nobody reads may find the connection reset before the answer.
    large = contextlib.suppress(ConnectionError) if len(sent) > BUFFER_BYTES else contextlib.nullcontext()
    with gateway.connect() as client, large:
        client.sendall(sent)
        assert read_all(client).split()[1] == b"400"
    assert_serves(gateway)


def test_a_request_that_is_too_large_is_refused_before_it_comes(gateway: FrontedGateway) -> None:
    with gateway.connect() as client:
        head, _, body = request("a" * 100_000).partition(b"\r\n\r\n")
        head = head.replace(b"Content-Length: ", b"Content-Length: 99999999999")
        client.sendall(head + b"\r\n\r\n" + body)
        assert refusal(read_all(client)) == (413, "request_too_large")
    gateway.logged(status=413, error="request_too_large")


def test_an_endless_header_is_cut_off(gateway: FrontedGateway) -> None:
    before = gateway.haproxy.memory_info().rss
    with gateway.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: ")
        flood(client, b"x" * 65536)
    assert gateway.haproxy.memory_info().rss - before < 16 * 2**20
    assert_serves(gateway)


def test_a_body_that_is_refused_while_it_is_sent_lets_the_client_read_why(gateway: FrontedGateway) -> None:
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
def test_who_sends_a_request_too_slowly_gets_408(gateway: FrontedGateway, begun: bytes, each: bytes) -> None:
    with gateway.connect() as client:
        began = time.monotonic()
        client.sendall(begun or each)
        while not select.select([client], [], [], 0.2)[0] and time.monotonic() - began < 10:
            # A request line is one word, of which no more may come than makes sense.
            client.sendall(each if begun else b"")
        assert read_all(client).split()[1] == b"408"
        assert 0.9 < time.monotonic() - began < 5
    assert_serves(gateway)


def test_a_large_body_may_take_its_time_while_it_comes(gateway: FrontedGateway) -> None:
    sent = request("word " * 19_000, max_tokens=1)
    with gateway.connect() as client:
        client.sendall(sent[:70_000])  # the front keeps no more
        for start in range(70_000, len(sent), 5_000):
            time.sleep(0.2)
            client.sendall(sent[start : start + 5_000])
        assert client.recv(100).startswith(b"HTTP/1.1 400")  # longer than the model's context
    assert_serves(gateway)


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_the_work_of_a_client_that_has_left_is_stopped(
    gateway: FrontedGateway, stream: bool, how: str
) -> None:
    """Without a stream nothing would be written for a minute, which is when it shows that nobody reads."""
    client = gateway.connect()
    client.sendall(request("every:0.2" if stream else "every:50", stream=stream, max_tokens=300))
    gateway.wait_for(lambda state: state["running"] == 1)
    if stream:
        client.recv(10)
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half":
        client.shutdown(socket.SHUT_WR)  # as other proxies do, ours takes who sends no more for gone
    else:
        client.close()
    gateway.wait_for(lambda state: state["running"] == 0, timeout_s=5)
    client.close()
    assert_idle(gateway)


# Pipelines


def test_pipelined_requests_are_answered_in_their_order(gateway: FrontedGateway) -> None:
    with gateway.connect() as client:
        client.sendall(b"".join(request("every:0.02", max_tokens=n) for n in (5, 3, 1)) + request(close=True))
        answer = read_all(client)
    used = [
        int(part.split(b"}")[0])
        for part in answer.split(b'"completion_tokens":')[1:]
        for part in [part.split(b",")[0]]
    ]
    assert used == [5, 3, 1, 3]


def test_nonsense_after_a_request_does_not_spoil_its_answer(gateway: FrontedGateway) -> None:
    with gateway.connect() as client:
        client.sendall(request("every:0.1", stream=True) + b"\x00nonsense" * 100)
        answer = read_all(client)
    assert b"data: [DONE]\n\n\r\n0\r\n\r\n" in answer


def test_requests_of_one_connection_run_one_by_one(gateway: FrontedGateway) -> None:
    with gateway.connect() as client:
        client.sendall(request("every:0.2", max_tokens=1) * 100)
        client.recv(12)
        assert gateway.state()["running"] <= 1
    assert_idle(gateway)


def test_pipelined_work_is_stopped_when_the_client_leaves(gateway: FrontedGateway) -> None:
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
def test_an_upgrade_is_not_carried_out(gateway: FrontedGateway, upgrade: str) -> None:
    head = f"GET /health HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: {upgrade}\r\n"
    head += "Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with gateway.connect() as client:
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")


# Slow readers


def rate(gateway: FrontedGateway, seconds: float) -> float:
    """Tokens a second of one client that reads as fast as it can."""
    count, body = 0, {"model": "chat", "prompt": "every:0.005", "max_tokens": 100_000, "stream": True}
    began = time.monotonic()
    with httpx.stream("POST", gateway.url + PATH, json=body, timeout=20) as answer:
        for line in answer.iter_lines():
            count += bool(line)
            if time.monotonic() - began > seconds:
                break
    return count / seconds


def test_a_client_that_reads_slowly_holds_nobody_up_and_is_kept_little_for(gateway: FrontedGateway) -> None:
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


def test_a_slow_reader_learns_that_its_stream_was_cut(gateway: FrontedGateway) -> None:
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


@pytest.mark.slow
def test_who_takes_nothing_of_an_answer_is_cut_off(gateway: FrontedGateway) -> None:
    assert_serves(gateway)
    with gateway.connect(receive_buffer=4096) as client:
        port = client.getsockname()[1]
        client.sendall(request("size:200000", max_tokens=50, close=True))
        gateway.wait_for(lambda state: state["tokens"] > 10 and state["running"] == 0)
        began = time.monotonic()
        while any(each.raddr and each.raddr.port == port for each in gateway.haproxy.net_connections()):
            assert time.monotonic() - began < 15
            time.sleep(0.05)
        assert time.monotonic() - began > 1
    assert_serves(gateway)


# Many


def test_a_thousand_idle_connections_hinder_nobody_and_reach_no_gateway(gateway: FrontedGateway) -> None:
    assert_serves(gateway)
    files, before = settled_files(gateway), gateway.haproxy.memory_info().rss
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
        assert gateway.open_files() - files < 10
        more = gateway.haproxy.memory_info().rss - before
        print(f"{more / 2**20:.1f} MiB more")
        assert more < 64 * 2**20
    finally:
        for client in idle:
            client.close()
    assert_serves(gateway)


def test_who_holds_many_connections_leaves_others_room(tmp_path: Path) -> None:
    few = {"connections": 40, "request_s": 60.0}
    with fronted_gateway(tmp_path, few) as gateway, contextlib.ExitStack() as ends:
        there = list[socket.socket]()
        for _ in range(39):
            with contextlib.suppress(ConnectionResetError):
                there.append(ends.enter_context(gateway.connect()))
        time.sleep(0.5)
        kept = [client for client in there if not select.select([client], [], [], 0)[0]]
        assert len(kept) in range(29, 32), "three quarters"
        with socket.create_connection((HOST, gateway.port), 20, source_address=("127.0.0.2", 0)) as other:
            other.settimeout(20)
            other.sendall(request())
            assert other.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_on_which_no_request_comes_is_closed(gateway: FrontedGateway, sent: bytes) -> None:
    with gateway.connect() as client:
        if sent:
            flood(client, sent, pause_s=0.05)
        else:
            read_all(client)
