"""The gateway's real HTTP server in a process of its own, over a backend of a few lines.

A prompt tells the backend what to do, in words: `every:S` (seconds between tokens), `size:N` (characters of a
token's text), `fail` (break). `GET /stub` says what runs, `GET /stub/large` is
8 MB that anybody may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.config.reading.api_keys import Key, KeyRing, digest_of
from serve_apps.gateway.options import GatewayOptions
from serve_apps.http.server import HttpServer
from serve_apps.tokens.inbox import Item
from tests.serve_apps.held_text import HeldText
from tests.serve_apps.stub_gateway import StubBackend, StubGateway, prompt_tokens

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]


class PacedBackend(StubBackend):
    """Answers as its prompt says."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
        prompt = request.get("prompt")
        words = prompt.split() if isinstance(prompt, str) else []
        asked = dict(word.split(":", 1) for word in words if word.count(":") == 1)
        if not {"every", "size"} & asked.keys() and "fail" not in words:
            async for item in super().generate(application, request):
                yield item
            return
        if "fail" in words:
            raise RuntimeError("the backend broke")
        start = {"replica": "replica-1", "model_version": "tiny@3", "prompt_tokens": prompt_tokens(request)}
        self.running += 1
        try:
            wanted, held = request["max_tokens"] or 3, HeldText()
            for step in range(wanted):
                await asyncio.sleep(float(asked.get("every", 0)))
                self.tokens += 1
                text = held.add("x" * int(asked.get("size", 1)), last=step == wanted - 1)
                item: dict[str, Any] = {"text": text, "token_ids": (step,)}
                if step == 0:
                    item["start"] = start
                if step == wanted - 1:
                    item["finish_reason"] = "length"
                yield item
        finally:
            self.running -= 1


async def main(port: int, options: Mapping[str, Any]) -> None:
    for name, value in options.get("constants", {}).items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    keys = [Key(sha256=digest_of(key), tenant="ours", metrics=True) for key in options.get("keys", ())]
    gateway = StubGateway(
        KeyRing(keys) if keys else None,
        GatewayOptions.from_json(options.get("gateway", {})),
        **options.get("limits", {}),
    )
    backend = PacedBackend()
    gateway.service.backend = gateway.backend = backend
    if not options.get("warming", False):
        gateway.table = gateway.service.table = type(gateway.table)(gateway.table.versions)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/stub":
            document = {"running": backend.running, "tokens": backend.tokens}
            document["ids"] = [request.get("request_id") for request in backend.requests[-5:]]
            await JSONResponse(document)(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"] == "/stub/large":
            await StreamingResponse(b"x" * 2**16 for _ in range(128))(scope, receive, send)
            return
        await gateway.api(scope, receive, send)

    server = HttpServer(app, HOST, port)
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, ended.set)
    while not ended.is_set():
        server.check()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.2)
    await server.stop()


@dataclass(frozen=True)
class RunningGateway:
    """A gateway's process, from the outside."""

    process: psutil.Process
    port: int
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A new connection, with a timeout of 20 s for all that is done with it."""
        client = socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(20)
        client.connect((HOST, self.port))
        return client

    def state(self) -> dict[str, Any]:
        """What the backend does now."""
        document: dict[str, Any] = httpx.get(f"{self.url}/stub", timeout=20).json()
        return document

    def wait_for(self, condition: Any, timeout_s: float = 20.0) -> dict[str, Any]:
        """The backend's state as soon as the condition holds for it."""
        end = time.monotonic() + timeout_s
        while not condition(state := self.state()):
            assert time.monotonic() < end, state
            time.sleep(0.02)
        return state

    def logged(self, **fields: Any) -> dict[str, Any]:
        """The first line of the log with these fields, as soon as it is there."""
        end = time.monotonic() + 20
        while True:
            for line in self.lines():
                if fields.items() <= line.items():
                    return line
            assert time.monotonic() < end, self.log_path.read_text()[-3000:]
            time.sleep(0.02)

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines of the log; each is JSON."""
        return [
            json.loads(line)
            for line in self.log_path.read_text().splitlines(keepends=True)
            if line[-1] == "\n"
        ]

    def memory_bytes(self) -> int:
        rss: int = self.process.memory_info().rss
        return rss

    def open_files(self) -> int:
        count: int = self.process.num_fds()
        return count


@contextlib.contextmanager
def running_gateway(folder: Path, **options: Any) -> Iterator[RunningGateway]:
    """A gateway's process; its log is in the folder.

    Args:
        options: `limits` of the app, `constants` (by module.NAME) that are other than usual, `keys`,
            `warming` (an app that is not ready), `gateway` (see `GatewayOptions`).
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    log_path = folder / "gateway.log"
    with log_path.open("wb") as log:
        process = psutil.Popen(
            [sys.executable, "-m", "tests.serve_apps.gateway_process", str(port), json.dumps(options)],
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
    try:
        gateway = RunningGateway(process, port, log_path)
        end = time.monotonic() + 60
        while True:
            try:
                gateway.connect().close()
                break
            except OSError:
                assert process.poll() is None, log_path.read_text()
                assert time.monotonic() < end, log_path.read_text()
                time.sleep(0.05)
        yield gateway
        assert process.poll() is None, log_path.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), json.loads(sys.argv[2])))
