"""Every stream says how it ends, whatever its tokens are and whenever they come: read by OpenAI's own client.

The backend's items are as nasty as a model's: without text, half a character, several tokens at once, none,
at random times, and failures of all kinds between them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.hosts.endpoints import free_port
from serve_apps.gateway.backend import ReplicaLostError
from serve_apps.http.server import HttpServer
from serve_apps.openai.errors import ApiError
from serve_apps.tokens.inbox import Item
from tests.serve_apps.stub_gateway import StubBackend, StubGateway

HOST = "127.0.0.1"
FAILURES: Mapping[str, Callable[[], Exception]] = {
    "lost": lambda: ReplicaLostError("killed"),
    "refused": lambda: ApiError(500, "it broke", kind="server_error"),
    "raised": lambda: RuntimeError("a mistake in our own code"),
}


@dataclass(frozen=True)
class Step:
    """What one item of the backend holds; it comes after so many turns of the event loop."""

    turns: int
    text: str
    tokens: int


@dataclass(frozen=True)
class Script:
    """What a choice does: its items, and how it ends. `silence` is an end without a reason."""

    steps: tuple[Step, ...]
    ends: str

    @property
    def fails(self) -> bool:
        return self.ends not in ("stop", "length")


class ScriptedBackend(StubBackend):
    """Does for each choice what its script says."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: tuple[Script, ...] = ()

    async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
        script = self.scripts[int(request["request_id"].rpartition("-")[2])]
        start = {"replica": "replica-1", "model_version": "tiny@3", "prompt_tokens": 1}
        for number, step in enumerate(script.steps):
            for _ in range(step.turns):
                await asyncio.sleep(0)
            item: dict[str, Any] = {"text": step.text, "token_ids": tuple(range(step.tokens))}
            if number == 0:
                item["start"] = start
            if number == len(script.steps) - 1 and not script.fails:
                item["finish_reason"] = script.ends
            yield item
        if script.ends in FAILURES:
            raise FAILURES[script.ends]()


class Tape(httpx.HTTPTransport):
    """Keeps what came over the wire, which the client does not show."""

    body = b""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        assert isinstance(response.stream, httpx.SyncByteStream)
        self.body = b""
        return httpx.Response(
            response.status_code,
            headers=response.headers,
            stream=_Taped(response.stream, self),
            extensions=response.extensions,
        )


class _Taped(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, tape: Tape) -> None:
        self._stream = stream
        self._tape = tape

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._tape.body += part
            yield part

    def close(self) -> None:
        self._stream.close()


class Lines(logging.Handler):
    """The gateway's log lines of requests that have ended, by the ids of the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.by_id: dict[str, dict[str, Any]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        line = json.loads(record.getMessage())
        self.by_id[line["request_id"]] = line

    def of(self, request_id: str) -> dict[str, Any]:
        end = time.monotonic() + 10
        while request_id not in self.by_id:
            assert time.monotonic() < end
            time.sleep(0.0005)
        return self.by_id.pop(request_id)


@dataclass(frozen=True)
class Served:
    """A gateway that listens, and OpenAI's client to it."""

    backend: ScriptedBackend
    client: openai.OpenAI
    tape: Tape
    lines: Lines


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    port = free_port(HOST)
    backend, lines = ScriptedBackend(), Lines()
    logger = logging.getLogger("shoal.gateway")
    up, down = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        gateway = StubGateway()
        gateway.service.backend = backend
        server = HttpServer(gateway.api, HOST, port)
        await server.start()
        logger.addHandler(lines)
        up.set()
        await down.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert up.wait(20)
    tape = Tape()
    try:
        with openai.OpenAI(
            base_url=f"http://{HOST}:{port}/v1",
            api_key="none",
            max_retries=0,
            timeout=20,
            http_client=httpx.Client(transport=tape),
        ) as client:
            yield Served(backend, client, tape, lines)
    finally:
        logger.removeHandler(lines)
        loop.call_soon_threadsafe(down.set)
        thread.join(20)


STEPS = st.builds(
    Step,
    turns=st.sampled_from([0, 0, 1, 2, 7, 40]),
    text=st.sampled_from(["", "", "", "a", " b", "鱼", "🎣", "�", "\n\n", "data: [DONE]\n\n", "鱼🎣 c"]),
    tokens=st.sampled_from([0, 1, 1, 1, 4]),
)
SCRIPTS = st.builds(
    Script,
    steps=st.lists(STEPS, min_size=1, max_size=8).map(tuple),
    ends=st.sampled_from(["stop", "stop", "length", "length", "stop", "silence", *FAILURES]),
)


def read(served: Served, *, chat: bool, n: int, usage: bool) -> tuple[list[Any], str]:
    """Ask for a stream and read it to its end: its chunks, and the id of the request."""
    request_id = f"stream-{time.monotonic_ns()}"
    asked: dict[str, Any] = {"model": "chat", "n": n, "stream": True, "max_tokens": 9}
    asked["extra_headers"] = {"x-request-id": request_id}
    if usage:
        asked["stream_options"] = {"include_usage": True}
    if chat:
        asked["messages"] = [{"role": "user", "content": "鱼"}]
        stream = served.client.chat.completions.create(**asked)
    else:
        stream = served.client.completions.create(prompt="鱼", **asked)
    return list(stream), request_id


def check(served: Served, scripts: tuple[Script, ...], *, chat: bool, usage: bool) -> None:
    """One stream of these choices ends as it must."""
    served.backend.scripts = scripts
    if any(script.fails for script in scripts):
        with pytest.raises(openai.APIError) as failed:
            read(served, chat=chat, n=len(scripts), usage=usage)
        assert failed.value.message
        if not isinstance(failed.value, openai.APIStatusError):
            # It had begun: its last event is the error.
            *_, last = served.tape.body.split(b"\n\n")[:-1]
            assert json.loads(last.removeprefix(b"data: "))["error"]["message"]
        assert b"data: [DONE]\n\n" not in served.tape.body[-20:]
        return
    chunks, request_id = read(served, chat=chat, n=len(scripts), usage=usage)
    assert served.tape.body.endswith(b"\n\ndata: [DONE]\n\n")
    line = served.lines.of(request_id)
    assert (line["status"], line["error"]) == (200, None)
    tokens = sum(step.tokens for script in scripts for step in script.steps)
    assert line["completion_tokens"] == tokens
    if usage:
        *chunks, last = chunks
        assert (last.choices, last.usage.completion_tokens) == ([], tokens)
    texts, reasons = [""] * len(scripts), [""] * len(scripts)
    for chunk in chunks:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert not reasons[choice.index], "nothing comes after the end of a choice"
        texts[choice.index] += (choice.delta.content or "") if chat else choice.text
        reasons[choice.index] = choice.finish_reason or ""
    assert texts == ["".join(step.text for step in script.steps) for script in scripts]
    assert reasons == [script.ends for script in scripts]


LAST = {
    "/v1/responses": {"response.completed": "stop", "response.incomplete": "length", "response.failed": None},
    "/v1/messages": {"message_stop": "stop", "error": None},
}
"""How a stream of named events may end, and what that says."""


def check_named(served: Served, path: str, script: Script) -> None:
    """One stream of named events ends as it must; its last event is the only one of its kind."""
    served.backend.scripts = (script,)
    body: dict[str, Any] = {"model": "chat", "stream": True}
    if path == "/v1/messages":
        body |= {"messages": [{"role": "user", "content": "鱼"}], "max_tokens": 9}
    else:
        body |= {"input": "鱼"}
    request_id = f"named-{time.monotonic_ns()}"
    url = f"{str(served.client.base_url).removesuffix('/v1/')}{path}"
    answer = httpx.post(url, json=body, headers={"x-request-id": request_id}, timeout=20)
    line = served.lines.of(request_id)
    assert line["endpoint"] == path
    if answer.status_code != 200:
        assert script.fails
        assert answer.json()["error"]["message"]
        return
    events = []
    for text in answer.text.removesuffix("\n\n").split("\n\n"):
        name, _, data = text.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    said = [event["type"] for event in events if event["type"] in LAST[path]]
    assert said == [events[-1]["type"]]
    last = events[-1]
    text = "".join(
        event["delta"] if path == "/v1/responses" else event["delta"]["text"]
        for event in events
        if event["type"] in ("response.output_text.delta", "content_block_delta")
    )
    written = "".join(step.text for step in script.steps)
    if script.fails:
        assert LAST[path][last["type"]] is None
        assert line["error"]
        assert written.startswith(text)
        return
    assert line["error"] is None
    assert text == written
    if path == "/v1/responses":
        assert LAST[path][last["type"]] == script.ends
    else:
        assert last["type"] == "message_stop"
        reason = {"stop": "end_turn", "length": "max_tokens"}[script.ends]
        assert events[-2]["delta"]["stop_reason"] == reason


def ask_many(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """So many random streams."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        scripts = st.lists(SCRIPTS, min_size=1, max_size=3).map(tuple)
        given_all = given(scripts=scripts, chat=st.booleans(), usage=st.booleans())
        ignored = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
        return settings(max_examples=examples, deadline=None, suppress_health_check=ignored)(given_all(test))

    return decorate


@ask_many(150)
def test_every_stream_says_how_it_ends(
    served: Served, scripts: tuple[Script, ...], chat: bool, usage: bool
) -> None:
    check(served, scripts, chat=chat, usage=usage)


@pytest.mark.slow
@ask_many(1000)
def test_a_thousand_streams_say_how_they_end(
    served: Served, scripts: tuple[Script, ...], chat: bool, usage: bool
) -> None:
    check(served, scripts, chat=chat, usage=usage)


@pytest.mark.parametrize("chat", [True, False])
def test_a_token_without_text_after_one_with_text_ends_nothing(served: Served, chat: bool) -> None:
    steps = (Step(0, "a", 1), Step(20, "", 1), Step(20, "🎣", 3), Step(20, "", 1))
    check(served, (Script(steps, "stop"),), chat=chat, usage=True)


@given(script=SCRIPTS, path=st.sampled_from(sorted(LAST)))
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_stream_of_named_events_says_how_it_ends(served: Served, script: Script, path: str) -> None:
    check_named(served, path, script)
