"""The gateway without Ray: the real API over a backend whose replicas are a few lines of Python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from cluster.config.reading.api_keys import KeyRing
from cluster.config.sections.serve import LimitsConfig, ServeAppConfig
from serve_apps.gateway.access import Access
from serve_apps.gateway.api import build_api
from serve_apps.gateway.app_table import AppTable, AppVersion
from serve_apps.gateway.backend import ReplicaLostError
from serve_apps.gateway.options import GatewayOptions
from serve_apps.gateway.service import GatewayService
from serve_apps.openai.errors import too_long
from serve_apps.spec import AppSpec
from serve_apps.tokens.inbox import Item
from tests.serve_apps.held_text import HeldText

CONTEXT_LENGTH = 64

CONFIG = ServeAppConfig(
    model="tiny@latest",
    limits=LimitsConfig(max_tokens=32, queue=4, batch=4, body_bytes=100_000, request_timeout_s=5.0),
)


class StubBackend:
    """Answers token k of a request with the text ` <k>` and the id 100 + k; that of every second token comes
    with the next.

    `script` holds, for the next attempts in turn, after how many tokens each is lost (None: not at all): with
    an engine that broke if `breaks`, else with a replica that was shut down.
    While `gate` is not set, an attempt stops after its first `tokens_before_gate` tokens.
    """

    def __init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.running = 0
        self.script: list[int | None] = []
        self.breaks = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.tokens_before_gate = 0
        self.cached_tokens: int | None = None
        """What it says was in its cache."""

    async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
        assert application == "chat"
        self.requests.append(request)
        lost_after = self.script.pop(0) if self.script else None
        replica = f"replica-{len(self.requests)}"
        start = {"replica": replica, "model_version": "tiny@3", "prompt_tokens": prompt_tokens(request)}
        self.running += 1
        try:
            wanted = 3 if request["max_tokens"] is None else request["max_tokens"]
            if start["prompt_tokens"] + wanted > CONTEXT_LENGTH:
                yield {
                    "start": start,
                    **too_long(start["prompt_tokens"], CONTEXT_LENGTH, wanted, "p").as_item(),
                }
                return
            logprobs, held = request["sampling"]["logprobs"], HeldText()
            told = {"start": start, "cached_tokens": self.cached_tokens, **prompt_of(request)}
            if not wanted:
                yield {"text": "", "token_ids": (), "finish_reason": "length", **told}
            for step in range(wanted):
                if step == lost_after:
                    raise ReplicaLostError("killed", replica if self.breaks else None)
                if step >= self.tokens_before_gate:
                    await self.gate.wait()
                text = held.add(f" {step}", last=step == wanted - 1)
                item: dict[str, Any] = {"text": text, "token_ids": (100 + step,)}
                if logprobs is not None:
                    item["logprobs"] = [
                        (
                            f" {step}",
                            f" {step}".encode(),
                            -0.5,
                            [(f" {i}", f" {i}".encode(), i, -1.0 - i) for i in range(logprobs)],
                        )
                    ]
                if step == 0:
                    item.update(told)
                if step == wanted - 1:
                    item["finish_reason"] = "length"
                yield item
        finally:
            self.running -= 1

    async def kept(self, application: str, request: str, wait_s: float) -> Mapping[int, str]:
        """Nothing was lost."""
        return {}

    async def ask(self, application: str, method: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """An embedding is the number of the prompt's tokens, and tokens are the lengths of its words."""
        self.requests.append({**request, "method": method})
        if self.script and self.script.pop(0) is not None:
            raise ReplicaLostError("killed", f"replica-{len(self.requests)}" if self.breaks else None)
        start = {"replica": f"replica-{len(self.requests)}", "model_version": "tiny@3"}
        if method == "tokenizer_info":
            return {
                "start": start,
                "info": {"tokenizer_class": "Stub", "eos_token": "</s>", "bos_token": None},
            }
        if method == "detokenize":
            return {"start": start, "prompt": " ".join(map(str, request["tokens"]))}
        count = prompt_tokens(request)
        if count > CONTEXT_LENGTH and method == "embed" and "cut" not in request:
            return {"start": start, **too_long(count, CONTEXT_LENGTH, None, "prompt").as_item()}
        if method == "embed":
            most = request.get("cut", -1)
            count = count if most < 0 else min(count, most)
            return {"start": {**start, "prompt_tokens": count}, "embedding": [float(count), 0.5]}
        tokens = {"start": start, "tokens": list(range(count))}
        return {**tokens, "token_strs": [f"t{i}" for i in range(count)]} if request.get("names") else tokens


def prompt_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of a prompt whose tokens are its words, with numbers from 0 as their ids. Ids are
    told as text with `#`."""
    prompt = request.get("prompt", "a b")
    ids = list(range(len(prompt.split()))) if isinstance(prompt, str) else list(prompt)
    told: dict[str, Any] = {}
    if request.get("echo"):
        told["text"] = prompt if isinstance(prompt, str) else " ".join(f"#{token}" for token in ids)
    if request.get("token_ids"):
        told["token_ids"] = ids
    top = request["sampling"].get("prompt_logprobs")
    if top is not None:
        names = prompt.split() if isinstance(prompt, str) else [f"#{token}" for token in ids]
        pieces = [f" {name}".encode() if at else name.encode() for at, name in enumerate(names)]
        told["logprobs"] = [
            (
                piece.decode(),
                piece,
                -0.25 * at if at else None,
                [(f"t{i}", f"t{i}".encode(), 900 + i, -0.5 - i) for i in range(top if at else 0)],
                token,
                at + 1 if at else None,
            )
            for at, (piece, token) in enumerate(zip(pieces, ids, strict=True))
        ]
    return {"prompt": told} if told else {}


def prompt_tokens(request: Mapping[str, Any]) -> int:
    if "messages" in request:
        return sum(len(message["content"].split()) for message in request["messages"])
    prompt = request["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


class StubGateway:
    """One app, `chat`, behind the real API; `client` talks to it in this process."""

    def __init__(
        self, keys: KeyRing | None = None, options: GatewayOptions | None = None, **limits: Any
    ) -> None:
        self.backend = StubBackend()
        config = CONFIG.model_copy(update={"limits": CONFIG.limits.model_copy(update=limits)})
        spec = AppSpec("chat", config, model_path="/nowhere", model_version="tiny@3")
        version = AppVersion("chat", spec, CONTEXT_LENGTH, created=1, replicas=1, ready=True)
        self.table = AppTable({"chat": (version,)}, frozenset({"warming"}))
        access = Access(keys, metrics_from=options.metrics_from if options else ())
        self.service = GatewayService(self.backend, self._look_up, access, options)
        self.service.table = self.table
        self.api: FastAPI = build_api(self.service)

    async def _look_up(self) -> AppTable:
        self.service.table = self.table
        return self.table

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.api, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client


class RawRequest:
    """A request at the level of ASGI: the test sees each part as it is sent, and can go away."""

    def __init__(self, api: FastAPI, path: str, document: dict[str, Any]) -> None:
        self._body: bytes | None = json.dumps(document).encode()
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._gone = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
            "root_path": "",
            "headers": [],
            "server": ("gateway", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.create_task(api(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.put_nowait(message)

    def go_away(self) -> None:
        self._gone.set()


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    """Let the other tasks run until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0)
