"""What the gateway does before it refuses a request is bounded by the size of its body, whatever is in it.

Each body is sent to the gateway's own process; its processor time and its memory are measured there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.routing import Match

from serve_apps.anthropic.schema import CountTokensRequest, MessagesRequest
from serve_apps.openai.chat_schema import ChatRequest, Message
from serve_apps.openai.responses_schema import ResponsesRequest
from serve_apps.openai.schema import CompletionRequest, ResponseFormat, StructuredOutputs
from serve_apps.openai.text_schema import (
    DetokenizeRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from tests.pace import at_most, used_s
from tests.serve_apps.gateway_process import RunningGateway, running_gateway
from tests.serve_apps.stub_gateway import StubGateway

BODY_BYTES = 400_000
MEMORY_FOR_A_BYTE = 40
"""An empty list is 3 bytes of JSON and 64 of Python's; all else that a body can hold is less."""
MEMORY_BYTES = 6 * 2**20
"""Beside that: what a process takes from the system, it takes in large pieces."""
LOOPS = 7.6
"""Of tests.pace, for a body of this size: about ten times what reading the worst of them takes."""

WAIT_LOOPS = 9.6
"""What the gateway may do while others wait, as ten times as large a body is read: of the processor, since
who else is on this machine makes all of it longer."""


def many(item: str) -> str:
    """A list of as many of these as fit in a body."""
    return f"[{','.join([item] * (BODY_BYTES // (len(item) + 1)))}]"


VALUES: dict[str, Callable[[], str]] = {
    "numbers": lambda: many("1"),
    "wrong numbers": lambda: many("-1"),
    "strings": lambda: many('"a"'),
    "no strings": lambda: many('""'),
    "nulls": lambda: many("null"),
    "lists": lambda: many("[]"),
    "lists of one": lambda: many("[1]"),
    "objects": lambda: many("{}"),
    "messages": lambda: many('{"role":"user","content":""}'),
    "calls": lambda: many('{"type":"function_call","call_id":"","name":"","arguments":""}'),
    "thoughts": lambda: many('{"type":"reasoning"}'),
    "tools": lambda: many('{"type":"function","name":"a"}'),
    "answers": lambda: many('{"role":"assistant","content":"aaaaaaaaaaaaaaaaaaaa"}'),
    "parts": lambda: many('{"type":"text","text":""}'),
    "keys": lambda: json.dumps({f"k{n}": 1 for n in range(BODY_BYTES // 13)}),
    "text": lambda: json.dumps("a " * (BODY_BYTES // 2)),
    "depth": lambda: "[" * (BODY_BYTES // 2) + "]" * (BODY_BYTES // 2),
}
PROMPT = '"model":"chat","prompt":"a"'
MESSAGES = '"model":"chat","messages":[{"role":"user","content":"a"}]'
INPUT = '"model":"chat","input":"a"'
TEXTS = '"model":"chat","text_1":"a","text_2":"b"'
QUERY = '"model":"chat","query":"a","documents":["b"]'
TOKENS = '"model":"chat","tokens":[1]'
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, ANTHROPIC = "/v1/responses", "/v1/messages"


def fields(kind: Any) -> list[str]:
    """In an order that does not change from run to run."""
    more = {*getattr(kind, "NEUTRAL", ()), *getattr(kind, "IGNORED", ())}
    return [*kind.model_fields, *sorted(more), "unknown"]


def templates() -> list[tuple[str, str, str]]:
    """Paths, bodies with a place for one value in each field that there is, and the field's name."""
    made = []
    for path, kind, rest in (
        (COMPLETIONS, CompletionRequest, PROMPT),
        (CHAT, ChatRequest, MESSAGES),
        ("/v1/embeddings", EmbeddingRequest, INPUT),
        ("/pooling", PoolingRequest, INPUT),
        ("/score", ScoreRequest, TEXTS),
        ("/rerank", RerankRequest, QUERY),
        ("/tokenize", TokenizeRequest, PROMPT),
        ("/detokenize", DetokenizeRequest, TOKENS),
        (RESPONSES, ResponsesRequest, INPUT),
        (f"{RESPONSES}/input_tokens", ResponsesRequest, INPUT),
        (ANTHROPIC, MessagesRequest, f'"max_tokens":1,{MESSAGES}'),
        ("/v1/messages/count_tokens", CountTokensRequest, MESSAGES),
    ):
        # The last of two fields of one name holds.
        made += [(path, f'{{{rest},"{field}":%s}}', field) for field in fields(kind)]
    for field in fields(Message):
        message = f'{{"role":"user","content":"a","{field}":%s}}'
        made.append((CHAT, f'{{"model":"chat","messages":[{message}]}}', field))
    for field in fields(ResponseFormat):
        form = f'{{"type":"json_schema","{field}":%s}}'
        made.append((COMPLETIONS, f'{{{PROMPT},"response_format":{form}}}', field))
    for field in fields(StructuredOutputs):
        name = "json" if field == "schema_of_json" else field
        made.append((COMPLETIONS, f'{{{PROMPT},"structured_outputs":{{"{name}":%s}}}}', field))
    for field in ("type", "content", "output", "summary", "arguments"):
        item = f'{{"role":"user","content":"a","{field}":%s}}'
        made.append((RESPONSES, f'{{"model":"chat","input":[{item}]}}', field))
    for field in ("type", "content", "role"):
        message = f'{{"role":"user","content":"a","{field}":%s}}'
        made.append((ANTHROPIC, f'{{"model":"chat","max_tokens":1,"messages":[{message}]}}', field))
    # A whole list of these is right, and what is refused comes after it.
    made.append((COMPLETIONS, '{"model":"chat","n":128,"prompt":%s}', "all"))
    made.append((CHAT, '{"model":"chat","n":128,"messages":%s}', "all"))
    made.append((CHAT, '{"model":"chat","n":0,"messages":%s}', "all"))
    made.append((RESPONSES, '{"model":"chat","max_output_tokens":0,"input":%s}', "all"))
    made.append((RESPONSES, '{"model":"chat","background":true,"input":%s}', "all"))
    made.append((ANTHROPIC, '{"model":"chat","messages":%s}', "all"))
    # These read no body.
    made.append((f"{RESPONSES}/resp_1/cancel", "%s", "any"))
    made.append(("/ping", "%s", "any"))
    made.append(
        (ANTHROPIC, '{"model":"chat","max_tokens":1,"tool_choice":{"type":"any"},"messages":%s}', "all")
    )
    return made


QUICK_FIELDS = {
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "documents",
    "prompt",
    "messages",
    "tools",
    "tool_calls",
    "stop_token_ids",
    "input",
    "tokens",
    "model",
}
QUICK_VALUES = {"numbers", "objects", "keys", "text"}
QUICK_LISTS = {"messages", "calls", "answers", "parts", "lists", "text"}


QUICK_EVERY = 199
"""Of all other bodies, one of so many."""


def bodies() -> list[Any]:
    """Every template with every value; quick are those that cost most, once for each field and for each path,
    and a few of all others."""
    made: list[Any] = []
    seen: set[str] = set()
    for path, template, field in templates():
        first = field in (QUICK_FIELDS | {"any"}) and not {path, field} <= seen
        if first:
            seen |= {path, field}
        values = QUICK_LISTS if field == "all" else QUICK_VALUES if first else set()
        for value in VALUES:
            quick = value in values or len(made) % QUICK_EVERY == 0
            name = f"{path} {template} {value}"
            made.append(pytest.param(path, template, value, id=name, marks=() if quick else pytest.mark.slow))
    return made


BODIES = bodies()


LARGE = [
    (CHAT, '{"model":"chat","n":0,"messages":%s}', "messages"),
    (COMPLETIONS, '{"model":"chat","prompt":%s}', "lists"),
    (COMPLETIONS, '{"model":"chat","prompt":%s}', "numbers"),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    limits = {"body_bytes": 2 * BODY_BYTES}
    with running_gateway(tmp_path_factory.mktemp("gateway"), limits=limits) as running:
        for path, template, _ in (*templates()[:3], *templates()[-3:]):
            send(running, path, template % VALUES["messages"]())  # what is loaded or grows once
        yield running


def send(gateway: RunningGateway, path: str, body: str) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{gateway.url}{path}", content=body.encode(), headers=headers, timeout=60)


def peak_bytes(process: psutil.Process) -> int:
    """The most memory that the process has had since `forget_peak`."""
    (line,) = [
        line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line
    ]
    return int(line.split()[1]) * 1024


def forget_peak(process: psutil.Process) -> None:
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def test_every_route_that_takes_a_body_is_here_and_quickly_too() -> None:
    api = StubGateway().api

    def handlers(paths: set[str]) -> set[object]:
        found = set()
        for path in paths:
            scope = {"type": "http", "method": "POST", "path": path, "headers": []}
            found.add(next(r.endpoint for r in api.routes if r.matches(scope)[0] is Match.FULL))  # type: ignore[attr-defined]
        return found

    posts = {route.endpoint for route in api.routes if "POST" in getattr(route, "methods", ())}  # type: ignore[attr-defined]
    assert len(posts) >= 13
    assert posts == handlers({path for path, _, _ in templates()})
    assert posts == handlers({each.values[0] for each in BODIES if not each.marks})


@pytest.mark.parametrize(("path", "template", "value"), BODIES)
def test_a_refusal_costs_no_more_than_its_body(
    gateway: RunningGateway, path: str, template: str, value: str
) -> None:
    check(gateway, path, template % VALUES[value]())


@pytest.mark.parametrize("template", ['{{{},"{}":1}}', '{{{},"response_format":{{"{}":1}}}}'])
def test_a_name_that_is_not_known_is_not_repeated_at_length(gateway: RunningGateway, template: str) -> None:
    check(gateway, COMPLETIONS, template.format(PROMPT, "x" * BODY_BYTES))


def check(gateway: RunningGateway, path: str, body: str) -> None:
    """Send a body, and compare with its size what that cost."""
    process = gateway.process
    before_bytes = gateway.memory_bytes()
    forget_peak(process)
    began_s = used_s(process)
    answer = send(gateway, path, body)
    grown, took_s = peak_bytes(process) - before_bytes, used_s(process) - began_s
    if answer.status_code != 200:
        assert len(answer.content) < 2000
        assert json.loads(answer.content)["error"]["message"]
    assert answer.status_code in (200, 400, 404, 429)
    assert grown <= MEMORY_FOR_A_BYTE * len(body) + MEMORY_BYTES
    assert at_most(took_s, LOOPS)


@pytest.mark.parametrize(("path", "template", "value"), LARGE)
def test_others_are_answered_while_a_large_body_is_read(
    tmp_path: Path, path: str, template: str, value: str
) -> None:
    item = VALUES[value]()[1:-1]
    body = template % f"[{','.join([item] * 10)}]"
    waits_s: list[float] = []
    stop = threading.Event()
    with running_gateway(tmp_path, limits={"body_bytes": 2 * len(body)}) as gateway:

        def ask() -> None:
            with httpx.Client(base_url=gateway.url, timeout=60) as client:
                while not stop.is_set():
                    began_s = used_s(gateway.process)
                    assert client.get("/health").status_code == 200
                    waits_s.append(used_s(gateway.process) - began_s)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            assert send(gateway, path, body).status_code == 400
        finally:
            stop.set()
            asking.join()
    assert at_most(max(waits_s), WAIT_LOOPS)
