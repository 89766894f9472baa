"""A real S3 server on loopback, for tests: moto's, in a process of its own."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "shoal",
    "AWS_SECRET_ACCESS_KEY": "of fish",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""What clients of the server have in their environment; it takes any."""
BUCKET = "shoal-tests"
_OF_A_HOP = ("transfer-encoding", "connection", "content-length", "expect")


@contextmanager
def object_store() -> Iterator[int]:
    """The port of a server that holds one empty bucket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        make_bucket("127.0.0.1", port)
        yield port
    finally:
        server.terminate()
        server.wait(timeout=30)


@contextmanager
def reached() -> Iterator[int]:
    """The port of such a server; this process, and those it starts, have what its clients need."""
    with pytest.MonkeyPatch.context() as patch, object_store() as port:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield port


def uri(port: int, path: str) -> str:
    """The location of a path in the bucket."""
    return f"s3://{BUCKET}/{path}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


@contextmanager
def faltering(port: int) -> Iterator[tuple[int, list[str]]]:
    """A port that turns every request away once, as a busy store does, before it reaches the server.

    Yields:
        the port, and what was turned away so far.
    """
    refused: list[str] = []
    seen: set[str] = set()

    def is_new(request: str) -> bool:
        if request in seen:
            return False
        seen.add(request)
        refused.append(request)
        return True

    with _before(port, is_new) as front:
        yield front, refused


@contextmanager
def late(port: int, paths: str, seconds: float) -> Iterator[tuple[int, threading.Event]]:
    """A port behind which what is written to paths of a pattern comes late, while it is asked for.

    Yields:
        the port, and what is set to ask for it.
    """
    asked = threading.Event()

    def wait(request: str) -> bool:
        if asked.is_set() and request.startswith("PUT") and re.search(paths, request):
            time.sleep(seconds)
        return False

    with _before(port, wait) as front:
        yield front, asked


@contextmanager
def _before(port: int, turns_away: Callable[[str], bool]) -> Iterator[int]:
    """A port that hands requests on to the server, but those that are turned away (method and path)."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self._body()
            if turns_away(f"{self.command} {self.path}"):
                self._answer(503, {}, b"<Error><Code>SlowDown</Code><Message>later</Message></Error>")
                return
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_A_HOP}
            upstream.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            answer = upstream.getresponse()
            self._answer(answer.status, dict(answer.getheaders()), answer.read())
            upstream.close()

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass  # trailers
            return body

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                # A HEAD tells the length of what it does not send.
                if name.lower() not in _OF_A_HOP:
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def make_bucket(host: str, port: int) -> None:
    """Make the bucket of a server, once that answers."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, port)).close()
            break
        except OSError:
            assert time.monotonic() < deadline, "the S3 server did not start"
            time.sleep(0.05)
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=BUCKET)
