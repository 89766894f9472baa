"""A load: when the first token of an answer was there, and what counts as failed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from infra.lab.bench.clients import SteadyLoad

WAIT_S = 0.5
Answering = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers as its server says, and counts the requests that run."""

    server: Server
    ended = False

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.counting:
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        self.server.answering(self)
        self.end()

    def begin(self, replica: str | None = "r1") -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        if replica is not None:
            self.send_header("x-shoal-replica", replica)
        self.end_headers()

    def event(self, document: Any) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        if text == "[DONE]":
            self.end()
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def end(self) -> None:
        """Before the client can know: it may ask again at once."""
        with self.server.counting:
            self.server.running -= not self.ended
            self.ended = True

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """A stand-in for the gateway."""

    daemon_threads = True

    def __init__(self, answering: Answering) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answering = answering
        self.counting = threading.Lock()
        self.running = self.most = 0
        self.asked: dict[str, Any] = {}


@contextmanager
def serving(answering: Answering) -> Iterator[tuple[Server, str]]:
    server = Server(answering)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def slow_to_end(handler: Handler) -> None:
    handler.begin()
    handler.event({"choices": [{"text": "a"}]})
    time.sleep(WAIT_S)
    handler.event({"choices": [{"text": "b"}]})
    handler.event({"choices": [], "usage": {"completion_tokens": 2}})
    handler.event("[DONE]")


def test_the_first_token_is_timed_and_not_the_answer() -> None:
    with serving(slow_to_end) as (server, url), SteadyLoad(url, "chat", "hi", clients=1) as load:
        load.level = 1
        until(lambda: load.first_tokens)
        assert not load.answers
        until(lambda: load.answers)
        answer = load.answers[0]
    assert answer.first - answer.sent < WAIT_S
    assert answer.ended - answer.first > WAIT_S / 2  # the first may have been read late
    assert (answer.replica, answer.tokens) == ("r1", 2)
    assert load.first_tokens[0] == (answer.first, "r1")
    assert (server.asked["model"], server.asked["stream"]) == ("chat", True)
    assert load.failures == []


def test_as_many_ask_as_the_level_says_and_those_that_run_are_answered() -> None:
    with serving(slow_to_end) as (server, url):
        with SteadyLoad(url, "chat", "hi", clients=4) as load:
            load.level = 3
            until(lambda: server.most == 3)
            load.level, answered = 1, len(load.answers)
            until(lambda: len(load.answers) >= answered + 3 and server.running <= 1)
            server.most = 0
            until(lambda: len(load.answers) >= answered + 6)
        assert server.most == 1
        assert len(load.first_tokens) == len(load.answers)
    assert load.failures == []


def refused(handler: Handler) -> None:
    handler.send_response(503)
    handler.end_headers()
    handler.wfile.write(b'{"error": {"message": "no room", "type": "x", "param": null, "code": null}}')


def failed(handler: Handler) -> None:
    handler.send_response(502)
    handler.end_headers()
    handler.wfile.write(b"no room")


def cut_off(handler: Handler) -> None:
    handler.connection.close()


def broken_off(handler: Handler) -> None:
    handler.begin()
    handler.event({"choices": [{"text": "a"}]})


def ended_with_an_error(handler: Handler) -> None:
    broken_off(handler)
    handler.event({"error": {"message": "the replica is gone"}})
    handler.event("[DONE]")


def without_a_token(handler: Handler) -> None:
    handler.begin()
    handler.event("[DONE]")


@pytest.mark.parametrize(
    ("answering", "words", "told", "status"),
    [
        (refused, "503: no room", True, 503),
        (failed, "502: no room", False, 502),
        (cut_off, "RemoteProtocolError", False, None),
        (broken_off, "ended before its last event", False, 200),
        (ended_with_an_error, "the replica is gone", True, 200),
        (without_a_token, "ended before its last event", False, 200),
    ],
)
def test_what_is_no_whole_answer_has_failed(
    answering: Answering, words: str, told: bool, status: int | None
) -> None:
    with serving(answering) as (_, url), SteadyLoad(url, "chat", "hi", clients=1, pause_s=0.01) as load:
        load.level = 1
        until(lambda: load.failures)
    failure = load.failures[0]
    assert words in failure.reason
    assert (failure.told, failure.status) == (told, status)
    assert load.answers == []


def waits_first(handler: Handler) -> None:
    """As the gateway does for who waits long: the answer begins before anybody has it."""
    handler.begin(replica=None)
    handler.wfile.write(b": waiting\n\n")
    handler.wfile.flush()
    handler.event({"choices": [{"text": "a"}]})
    handler.event({"choices": [], "usage": {"completion_tokens": 1}})
    handler.event("[DONE]")


def test_an_answer_that_begins_before_its_replica_is_known_is_one() -> None:
    with serving(waits_first) as (_, url), SteadyLoad(url, "chat", "hi", clients=1) as load:
        load.level = 1
        until(lambda: load.answers or load.failures)
    assert not load.failures
    assert (load.answers[0].replica, load.answers[0].tokens) == (None, 1)
    assert not load.first_tokens, "nobody knows whose they are"


INTERRUPTED = """
from infra.lab.bench.clients import SteadyLoad
SteadyLoad("http://127.0.0.1:9/v1", "chat", "import", clients=2).__enter__()
raise KeyboardInterrupt  # before the body of the `with`
"""


def test_a_process_that_is_interrupted_while_a_load_begins_does_not_wait_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT, done.stderr
