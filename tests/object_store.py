"""A real S3 server on loopback, for tests: moto's, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "shoal",
    "AWS_SECRET_ACCESS_KEY": "of fish",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""What clients of the server have in their environment; it takes any."""
BUCKET = "shoal-tests"


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
        _wait_for(port)
        _make_bucket(port)
        yield port
    finally:
        server.terminate()
        server.wait(timeout=30)


def uri(port: int, path: str) -> str:
    """The location of a path in the bucket."""
    return f"s3://{BUCKET}/{path}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "the S3 server did not start"
            time.sleep(0.05)


def _make_bucket(port: int) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=BUCKET)
