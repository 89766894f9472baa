"""The front's actor over the real HAProxy: it follows the gateways, and its certificate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.hosts.endpoints import free_port
from serve_apps.front.front import Front
from tests.certificates import make_certificate

HOST = "127.0.0.1"


class Desk:
    """The apps' controller, as far as the front asks it."""

    def __init__(self) -> None:
        self.urls: tuple[str, ...] = ()

    async def ask(self, *_: Any, **__: Any) -> tuple[str, ...]:
        return self.urls


class Gateway(BaseHTTPRequestHandler):
    """Answers with its port."""

    def do_GET(self) -> None:
        body = str(self.server.server_address[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # who looked whether it lives has left
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateways() -> Iterator[list[str]]:
    """The URLs of two."""
    servers = [ThreadingHTTPServer((HOST, 0), Gateway) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://{HOST}:{server.server_address[1]}" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.1)


def test_it_follows_the_gateways_and_the_certificate(gateways: list[str], tmp_path: Path) -> None:
    certificate, key = (Path(each) for each in make_certificate(tmp_path, "front", f"IP:{HOST}"))
    other, other_key = (Path(each) for each in make_certificate(tmp_path, "other", f"IP:{HOST}"))
    port, desk = free_port(HOST), Desk()
    info = {
        "cluster_id": "c",
        "head_ip": "192.0.2.9",
        "gateway_host": HOST,
        "gateway_port": port,
        "gateway_count": 2,
        "gateway_keys": None,
        "gateway_front": {
            "certificate": str(certificate),
            "private_key": str(key),
            "address_connections": None,
            "address_requests": None,
        },
    }

    def answered() -> str:
        try:
            return httpx.get(f"https://{HOST}:{port}/", verify=False, timeout=5, trust_env=False).text
        except httpx.TransportError:
            return ""

    def shown() -> str:
        return ssl.get_server_certificate((HOST, port))

    async def story() -> None:
        front = Front(info)
        front._controller = desk  # type: ignore[assignment]
        try:
            await front.state()
            desk.urls = (gateways[0],)
            await until(lambda: answered() == gateways[0].rpartition(":")[2])
            first = shown()

            certificate.write_bytes(other.read_bytes())
            key.write_bytes(other_key.read_bytes())
            await until(lambda: shown() != first)

            # A gateway takes another's place while the certificate is being replaced.
            away = certificate.rename(tmp_path / "away")
            desk.urls = (gateways[1],)
            async with asyncio.timeout(20):
                while (await front.state())["failure"] is None:
                    await asyncio.sleep(0.1)
            away.rename(certificate)
            await until(lambda: answered() == gateways[1].rpartition(":")[2])
            async with asyncio.timeout(20):
                while (await front.state())["failure"] is not None:
                    await asyncio.sleep(0.1)
        finally:
            await front.end()

    asyncio.run(story())


SHORT_OF_FILES = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1500, 1500))
from serve_apps.front.front import Front
front = Front(json.loads(sys.argv[1]))
front._gateways = ("http://127.0.0.1:1",)
front._go_on()
print(front._failure, front._haproxy.runs())
front._haproxy.end()
"""


def test_it_runs_where_few_files_may_be_open() -> None:
    given = {"certificate": None, "address_connections": None, "address_requests": None}
    info = {
        "cluster_id": "c",
        "head_ip": "192.0.2.9",
        "gateway_host": HOST,
        "gateway_port": free_port(HOST),
        "gateway_count": "all",
        "gateway_keys": None,
        "gateway_front": given,
    }
    command = [sys.executable, "-c", SHORT_OF_FILES, json.dumps(info)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "None True\n", done.stdout + done.stderr
