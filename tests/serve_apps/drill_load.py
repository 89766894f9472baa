"""A load for drills: what each client saw of each of its requests, tokens before an error included."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.serve_apps.background import in_background
from tests.serve_apps.event_lines import DONE, data_of

COMPLETIONS = "/v1/completions"
PROMPT = 100
TIMEOUT_S = 120.0
REFUSED_PAUSE_S = 0.1
"""Before a client that was refused a connection asks again."""


@dataclass
class Seen:
    """One request and its end. Times in seconds of the machine's steady clock."""

    request_id: str
    streamed: bool
    began: float
    ended: float = 0.0
    status: int = 0
    """0: there was no answer."""
    replica: str = ""
    """What the header says."""
    text: str = ""
    error: str = ""
    """The code of the error, or what the connection broke with."""
    message: str = ""
    """The error's sentence."""
    refused: bool = False
    """No connection was made, or the front has said that there is no gateway."""
    broken: bool = False
    """It was refused, or the connection broke."""

    @property
    def answered(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def begun(self) -> bool:
        """It is a stream that its client had seen the beginning of, if only its head."""
        return self.streamed and self.status == 200

    @property
    def ended_by_event(self) -> bool:
        """It is a stream that had sent something, and then said that its replica was lost."""
        return self.streamed and self.status == 200 and self.error == "replica_lost" and bool(self.text)


@dataclass
class DrillLoad:
    """The requests that have ended so far."""

    seen: list[Seen] = field(default_factory=list)

    def ended_since(self, moment: float) -> list[Seen]:
        return [each for each in self.seen if each.ended >= moment]


async def _ask(http: httpx.AsyncClient, seen: Seen, max_tokens: int) -> None:
    body = {
        "model": "chat",
        "prompt": [PROMPT],
        "max_tokens": max_tokens,
        "stream": seen.streamed,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"x-request-id": seen.request_id}
    try:
        async with http.stream("POST", COMPLETIONS, json=body, headers=headers) as answer:
            seen.status, seen.replica = answer.status_code, answer.headers.get("x-shoal-replica", "")
            if seen.streamed and seen.status == 200:
                whole = False
                async for line in answer.aiter_lines():
                    data = data_of(line)
                    if data == DONE:
                        whole = True
                    elif data is not None:
                        event = json.loads(data)
                        _note(seen, event.get("error"))
                        seen.text += "".join(choice["text"] for choice in event.get("choices", ()))
                if not whole and not seen.error:
                    seen.error = "the stream ended without [DONE]"
            else:
                document = json.loads(await answer.aread())
                _note(seen, document.get("error"))
                seen.refused = seen.error == "no_gateway"
                seen.broken = seen.refused or seen.error == "gateway_lost"
                seen.text = "" if seen.error else document["choices"][0]["text"]
    except httpx.TransportError as failure:
        seen.error, seen.broken = repr(failure), True
        seen.refused = isinstance(failure, httpx.ConnectError)
    seen.ended = time.monotonic()


def _note(seen: Seen, error: dict[str, Any] | None) -> None:
    if error is not None:
        seen.error, seen.message = error["code"] or error["type"], error["message"]


@contextmanager
def drill_load(url: str, clients: int, *, max_tokens: int) -> Iterator[DrillLoad]:
    """Clients that ask one thing after the other, every second one as a stream."""
    load, drill = DrillLoad(), uuid.uuid4().hex[:8]

    async def client(http: httpx.AsyncClient, number: int, stop: threading.Event) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            # No hyphen in it: the gateway adds to it after one.
            seen = Seen(f"{drill}.{number}.{count}", number % 2 == 1, time.monotonic())
            await _ask(http, seen, max_tokens)
            load.seen.append(seen)
            if seen.broken:
                await asyncio.sleep(REFUSED_PAUSE_S)

    async def run(stop: threading.Event) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:
            await asyncio.gather(*(client(http, number, stop) for number in range(clients)))

    with in_background(lambda stop: asyncio.run(run(stop))):
        yield load
