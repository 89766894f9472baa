"""The host of a gateway loses its power: nobody tells the front, and its connections stay as they are."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from cluster.hosts.endpoints import free_port
from infra.lab.hosts import network
from infra.lab.hosts.network import Network
from serve_apps.front.haproxy import Haproxy
from serve_apps.front.haproxy_config import FrontSettings, haproxy_config
from serve_apps.front.slots import Slots

pytestmark = pytest.mark.skipif(network.missing() is not None, reason=str(network.missing()))

GATEWAY = """
import sys, time
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer  # an HTTPServer asks for the name of its address

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(b"{}")

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        print("asked", flush=True)
        time.sleep(float(sys.argv[2]))
        self.answer(sys.argv[1].encode())

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingTCPServer((sys.argv[1], 8000), Handler).serve_forever()
"""
"""Answers with its address, after so many seconds."""


@contextmanager
def gateway(lan: Network, host: int, after_s: float) -> Iterator[subprocess.Popen[bytes]]:
    command = ["ip", "netns", "exec", lan.namespace(host), sys.executable, "-c", GATEWAY]
    process = subprocess.Popen(
        [*command, lan.address(host), str(after_s)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            try:
                httpx.get(f"http://{lan.address(host)}:8000/health", timeout=5, trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("cut", ["before it is asked", "while it answers"])
def test_a_request_at_a_host_that_is_gone_is_answered_by_another(cut: str) -> None:
    with Network(2) as lan, gateway(lan, 1, 60.0) as lost, gateway(lan, 2, 0.0):
        port, haproxy, slots = free_port("127.0.0.1"), Haproxy(), Slots(2)
        urls = [f"http://{lan.address(host)}:8000" for host in (1, 2)]
        slots.change(urls[:1])
        settings = FrontSettings("127.0.0.1", port, "secret", connections=100)
        answers = list[httpx.Response]()

        def ask() -> None:
            url = f"http://127.0.0.1:{port}/v1/completions"
            answers.append(httpx.post(url, json={}, timeout=30, trust_env=False))

        try:
            haproxy.go_by(haproxy_config(settings, slots.servers(), str(haproxy.directory)))
            asking = threading.Thread(target=ask)
            if cut == "before it is asked":
                lan.unplug(1)
            asking.start()
            if cut == "while it answers":
                assert lost.stdout is not None
                assert lost.stdout.readline() == b"asked\n"
                lan.unplug(1)
            began = time.monotonic()
            haproxy.tell(slots.change(urls))
            asking.join()
            took_s = time.monotonic() - began
        finally:
            haproxy.end()
        assert (answers[0].status_code, answers[0].text) == (200, lan.address(2))
        print(f"answered after {took_s:.1f} s")
        assert took_s < 12
