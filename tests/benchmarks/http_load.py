"""A load on the gateway over HTTP, and what became of each request; for the benchmarks of serving."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Ask:
    """One request: when it is due (seconds from the start of the load), and what it asks for."""

    due_s: float
    prompt: Sequence[int]
    max_tokens: int
    stream: bool = True

    def body(self, model: str) -> dict[str, Any]:
        body = {"model": model, "prompt": list(self.prompt), "max_tokens": self.max_tokens, "temperature": 0}
        if self.stream:
            return {**body, "stream": True, "stream_options": {"include_usage": True}}
        return body


@dataclass(frozen=True)
class Answer:
    """One request and its end; times in seconds from the start of the load."""

    due_s: float
    sent_s: float
    first_s: float | None
    """When the first tokens came; None where none did."""
    ended_s: float
    status: int
    """0: no answer."""
    tokens: int = 0
    replica: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def first_token_s(self) -> float:
        """From when the request was due, whenever it was sent, to its first tokens."""
        assert self.first_s is not None
        return self.first_s - self.due_s

    @property
    def lag_s(self) -> float:
        """How late the load generator was."""
        return self.sent_s - self.due_s


def session() -> aiohttp.ClientSession:
    """A client without a bound of its own on what it does at once."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def ask_once(http: aiohttp.ClientSession, url: str, model: str, ask: Ask, began: float) -> Answer:
    """Send a request now and read its answer to the end; `began` is the load's start (time.perf_counter)."""
    sent_s = time.perf_counter() - began
    first_s: float | None = None
    status, replica, error, tokens = 0, "", "", 0
    content = bytearray()
    try:
        async with http.post(f"{url}/v1/completions", json=ask.body(model)) as response:
            status, replica = response.status, response.headers.get("x-shoal-replica", "")
            async for part in response.content.iter_any():
                if first_s is None:
                    first_s = time.perf_counter() - began
                content += part
    except (aiohttp.ClientError, TimeoutError) as failure:
        error = repr(failure)
    ended_s = time.perf_counter() - began
    if not error:
        try:
            tokens = _completion_tokens(bytes(content), ask.stream)
        except (ValueError, KeyError, IndexError):
            error = content[-500:].decode(errors="replace")
    return Answer(ask.due_s, sent_s, first_s, ended_s, status, tokens, replica, error)


def _completion_tokens(content: bytes, stream: bool) -> int:
    """What the usage of an answer says; ValueError, KeyError or IndexError where it is none."""
    if stream:
        # The last event is [DONE], the one before tells the usage.
        usage, done = content.rstrip().split(b"\n\n")[-2:]
        if done != b"data: [DONE]":
            raise ValueError("the stream broke off")
        content = usage.removeprefix(b"data: ")
    return int(json.loads(content)["usage"]["completion_tokens"])


async def open_loop(url: str, model: str, asks: Sequence[Ask], began: float) -> list[Answer]:
    """Send each request when it is due, however many are still unanswered."""
    async with session() as http:
        running = []
        for ask in asks:
            wait_s = began + ask.due_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            running.append(asyncio.create_task(ask_once(http, url, model, ask, began)))
        return await asyncio.gather(*running)


async def closed_loop(url: str, model: str, asks: Sequence[Ask], clients: int) -> list[Answer]:
    """So many clients send the requests, each its next when it has its last answer; `due_s` is not used."""
    left: Iterator[Ask] = iter(asks)
    began = time.perf_counter()
    answers: list[Answer] = []
    async with session() as http:

        async def client() -> None:
            for ask in left:
                answers.append(await ask_once(http, url, model, ask, began))

        await asyncio.gather(*(client() for _ in range(clients)))
    return answers


def arrivals(
    rate: float, seconds: float, chance: random.Random, make: Callable[[float], Ask], since: float = 0.0
) -> list[Ask]:
    """Poisson arrivals of `rate` a second."""
    asks, now = [], since
    while (now := now + chance.expovariate(rate)) < since + seconds:
        asks.append(make(now))
    return asks


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of all values do not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan
