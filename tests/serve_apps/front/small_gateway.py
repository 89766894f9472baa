"""A process that a front takes for a gateway, and that starts in a moment."""

from __future__ import annotations

from contextlib import suppress

import httpx

from tests.waiting import wait_for

GATEWAY = r"""
import json, sys, time
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer  # an HTTPServer asks for the name of its address

host, port, answer, after_s = sys.argv[1:]

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(b"{}")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        sys.stdout.write("asked\n"); sys.stdout.flush()
        time.sleep(0.0 if asked.get("at_once") else float(after_s))
        self.answer(answer.encode())

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingTCPServer((host, int(port)), Handler).serve_forever()
"""
"""HOST PORT ANSWER SECONDS: what it answers, and after how long to those who do not ask for it at once."""


def until_it_answers(url: str) -> None:
    wait_for(lambda: _answers(url), f"nobody answers at {url}", timeout_s=30)


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    return False
