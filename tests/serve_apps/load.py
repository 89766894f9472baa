"""A load on an app of the fake engine, whose answers tell which version gave them, and what became of it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

from tests.serve_apps.background import in_background
from tests.serve_apps.event_lines import DONE, data_of

COMPLETIONS = "/v1/completions"
PROMPT = 100


@dataclass
class Answer:
    """One request and its end. Times in seconds, `began` of a steady clock."""

    began: float
    seconds: float
    status: int
    version: str | None
    """What the header says."""
    text: str
    error: str = ""
    waited: bool = False
    """Whether a stream began before any replica had it, so that its head names no version."""


@dataclass
class Load:
    """The answers so far."""

    max_tokens: int
    answers: list[Answer] = field(default_factory=list)

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status != 200 or answer.error]

    def mixed(self) -> list[Answer]:
        """The answers that are not wholly of the version that their header names; those that `waited`, of one
        that the header of another names. `NAME@v` counts up from `PROMPT + 1 + 1000 * v`."""
        texts = {version: self._text(version) for version in self.versions() if version}
        return [
            answer
            for answer in self.answers
            if answer.status == 200
            and (
                (answer.version and answer.text != texts[answer.version])
                or (answer.waited and not answer.error and answer.text not in texts.values())
            )
        ]

    def versions(self) -> list[str]:
        """The versions that answered, in the order of the first request of each; "" for what names none
        though it has not `waited`."""
        heads = [answer for answer in self.answers if not answer.waited]
        return list(dict.fromkeys(a.version or "" for a in sorted(heads, key=lambda a: a.began)))

    def _text(self, version: str) -> str:
        first = PROMPT + 1 + 1000 * int(version.rpartition("@")[2])
        return "".join(f" {first + step}" for step in range(self.max_tokens))

    def longest_gap(self, since: float, until: float) -> float:
        """The longest time in which nothing was answered."""
        ends = sorted(a.began + a.seconds for a in self.answers if since <= a.began + a.seconds <= until)
        moments = [since, *ends, until]
        return max(later - earlier for earlier, later in pairwise(moments))


async def _ask(http: httpx.AsyncClient, load: Load, stream: bool) -> None:
    began = time.monotonic()
    body = {"model": "chat", "prompt": [PROMPT], "max_tokens": load.max_tokens, "stream": stream}
    text, error, waited = "", "", False
    try:
        async with http.stream("POST", COMPLETIONS, json=body) as answer:
            content = (await answer.aread()).decode()
        status, version = answer.status_code, answer.headers.get("x-shoal-model-version")
        if status != 200:
            error = content
        elif stream:
            waited = content.startswith(": waiting")
            if not content.endswith("data: [DONE]\n\n"):
                error = "the stream ended without [DONE]"
            for line in content.split("\n\n"):
                data = data_of(line)
                if data is not None and data != DONE:
                    event = json.loads(data)
                    error = str(event.get("error") or "") or error
                    text += "".join(choice["text"] for choice in event.get("choices", ()))
        else:
            text = answer.json()["choices"][0]["text"]
    except httpx.HTTPError as failure:
        status, version, error = 0, None, repr(failure)
    load.answers.append(Answer(began, time.monotonic() - began, status, version, text, error, waited))


@contextmanager
def under_load(url: str, clients: int, *, max_tokens: int = 20) -> Iterator[Load]:
    """Clients that ask one thing after the other, every second one as a stream."""
    load = Load(max_tokens)

    async def client(http: httpx.AsyncClient, stream: bool, stop: threading.Event) -> None:
        while not stop.is_set():
            await _ask(http, load, stream)

    async def run(stop: threading.Event) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
            await asyncio.gather(*(client(http, number % 2 == 1, stop) for number in range(clients)))

    with in_background(lambda stop: asyncio.run(run(stop))):
        yield load
