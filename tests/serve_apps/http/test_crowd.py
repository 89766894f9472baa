"""Many connections that serve no request: whatever they are at, they lock nobody out, and end no answer."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.serve_apps.gateway_process import HOST, RunningGateway, running_gateway

PATH = "/v1/completions"
CROWD = "serve_apps.http.crowd"
MOST, MOST_OF_ADDRESS, MOST_TURNED_AWAY = 20, 10, 5
PATIENT = {
    f"{CROWD}.MOST_CONNECTIONS": MOST,
    f"{CROWD}.MOST_WAITING_OF_ADDRESS": MOST_OF_ADDRESS,
    f"{CROWD}.MOST_TURNED_AWAY": MOST_TURNED_AWAY,
    # What ends them by and by is no help here.
    "serve_apps.http.lingering.LINGER_S": 600.0,
    "serve_apps.http.connection.STALLED_S": 600.0,
    "serve_apps.http.message_bounds.REST_S": 600.0,
    "serve_apps.http.server.CHECK_EVERY_S": 0.1,
}
STRANGERS = 35


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    limits = {"max_tokens": 1000, "queue": 100, "request_timeout_s": 60.0}
    with running_gateway(folder, constants=PATIENT, keys=["k1"], limits=limits) as running:
        yield running


def head(method: str, path: str, **headers: object) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def asked(**fields: object) -> bytes:
    """A request of somebody who has a key."""
    body = json.dumps({"model": "chat", "prompt": "a", "max_tokens": 3, **fields}).encode()
    return head("POST", PATH, Authorization="Bearer k1", Content_Length=len(body)) + body


def connected(gateway: RunningGateway, host: str = HOST, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(20)
    client.bind((host, 0))
    client.connect((HOST, gateway.port))
    return client


def read_until(client: socket.socket, *ends: bytes) -> bytes:
    answer = b""
    while not any(end in answer for end in ends):
        piece = client.recv(65536)
        assert piece, answer
        answer += piece
    return answer


def begins(sent: bytes) -> Callable[[socket.socket], None]:
    return lambda client: client.sendall(sent)


def is_begun(sent: bytes) -> Callable[[socket.socket], None]:
    def go(client: socket.socket) -> None:
        client.sendall(sent)
        assert client.recv(12) == b"HTTP/1.1 200"

    return go


def is_answered(status: int, sent: bytes) -> Callable[[socket.socket], None]:
    def go(client: socket.socket) -> None:
        client.sendall(sent)
        assert read_until(client, b"}", b'""').split()[1] == b"%d" % status

    return go


BEGUN = head("POST", PATH, Content_Length=1000) + b"{"
STATES: dict[str, Callable[[socket.socket], None]] = {
    "no head": lambda client: None,
    "a head that is coming": begins(b"POST /v1/completions HTTP/1.1\r\nHo"),
    "a body that nobody reads, after 401": is_answered(401, BEGUN),
    "a body that nobody reads, after 200": is_answered(200, head("GET", "/health", Content_Length=9) + b"{"),
    "a body in chunks": is_answered(401, head("POST", PATH, Transfer_Encoding="chunked") + b"1\r\n{\r\n"),
    "what still comes after the last answer": is_answered(
        401, head("POST", PATH, Content_Length=1000, Connection="close") + b"{"
    ),
    "what still comes after nonsense": is_answered(400, b"nonsense\r\n\r\n"),
    "an idle connection": is_answered(200, head("GET", "/health")),
    "an answer to anybody that is taken slowly": is_begun(head("GET", "/stub/large")),
}


@contextlib.contextmanager
def strangers(gateway: RunningGateway, state: str, addresses: int) -> Iterator[Callable[[], socket.socket]]:
    """Opens one more connection without a key that is in this state, from so many addresses in turn."""
    opened: list[socket.socket] = []

    def one() -> socket.socket:
        host = f"127.0.0.{2 + len(opened) % addresses}"
        opened.append(connected(gateway, host, receive_buffer=4096))
        STATES[state](opened[-1])
        return opened[-1]

    try:
        yield one
    finally:
        for client in opened:
            client.close()


def is_gone(client: socket.socket) -> bool:
    client.settimeout(5)
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("addresses", [1, 8], ids=["one address", "many addresses"])
@pytest.mark.parametrize("state", STATES)
def test_who_is_not_served_locks_nobody_out(gateway: RunningGateway, state: str, addresses: int) -> None:
    with connected(gateway) as busy, connected(gateway) as upload:
        busy.sendall(asked(prompt="every:0.1 x", max_tokens=1000, stream=True))
        read_until(busy, b"data: ")
        # A large upload of somebody who was let in is served, however slowly it comes.
        whole = asked(prompt="a " * 10)
        upload.sendall(whole[:-20])
        with strangers(gateway, state, addresses) as one:
            there = []
            for _ in range(STRANGERS):
                there.append(one())
                with connected(gateway) as other:
                    other.sendall(asked())
                    assert read_until(other, b"}").startswith(b"HTTP/1.1 200 OK")
            most = MOST_OF_ADDRESS if addresses == 1 else MOST
            assert all(is_gone(client) for client in there[: STRANGERS - most]), "the oldest of them go first"
        upload.sendall(whole[-20:])
        assert read_until(upload, b"}").startswith(b"HTTP/1.1 200 OK")
        busy.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while busy.recv(65536):
                pass
        busy.settimeout(20)
        read_until(busy, b"data: ")


def test_where_all_are_served_each_one_more_can_read_that_there_is_no_room(gateway: RunningGateway) -> None:
    with contextlib.ExitStack() as stack:
        served = []
        for _ in range(MOST):
            served.append(client := stack.enter_context(connected(gateway)))
            client.sendall(asked(prompt="every:0.05 x", max_tokens=1000, stream=True))
            read_until(client, b"data: ")
        late = [stack.enter_context(connected(gateway)) for _ in range(MOST_TURNED_AWAY)]
        for client in late:
            client.sendall(asked())
            assert b"too_many_connections" in read_until(client, b"}")
        # Those have had their answers; they are kept for a moment, but not any number of them.
        for _ in range(2 * MOST):
            client = stack.enter_context(connected(gateway))
            assert b"too_many_connections" in read_until(client, b"}")
        assert all(is_gone(client) for client in late)
        for client in served:
            read_until(client, b"data: ")
        served[0].close()
        gateway_has_room = time.monotonic() + 10
        while True:
            with connected(gateway) as other:
                other.sendall(asked())
                if read_until(other, b"}").startswith(b"HTTP/1.1 200 OK"):
                    break
            assert time.monotonic() < gateway_has_room
