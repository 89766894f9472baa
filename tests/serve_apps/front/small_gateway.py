"""A process that a front takes for a gateway, and that starts in a moment."""

from __future__ import annotations

import time

import httpx

GATEWAY = """
import sys, time
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer  # an HTTPServer asks for the name of its address

host, port, answer, after_s = sys.argv[1:]

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(b"{}")

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        sys.stdout.write("asked\n"); sys.stdout.flush()
        time.sleep(float(after_s))
        self.answer(answer.encode())

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingTCPServer((host, int(port)), Handler).serve_forever()
"""
"""HOST PORT ANSWER SECONDS: what it answers, and after how long."""


def until_it_answers(url: str) -> None:
    while True:
        try:
            httpx.get(f"{url}/health", timeout=5, trust_env=False)
            break
        except httpx.HTTPError:
            time.sleep(0.05)
