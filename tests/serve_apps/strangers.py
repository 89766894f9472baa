"""Serve applications that are not Shoal's, run by Ray Serve's own command line."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.clusters import LiveCluster

TOOLS = Path(sys.executable).parent
APP = """
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Hello:
    def __call__(self, request):
        return "WORDS"

app = Hello.bind()
"""
READY_S = 60.0
STOP_S = 60.0


def eventually(condition: Callable[[], Any], timeout_s: float = 30.0, every_s: float = 0.1) -> float:
    """Seconds until the condition held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it did not happen in time"
        threading.Event().wait(every_s)
    return time.monotonic() - began


def write_app(directory: Path, module: str, words: str) -> str:
    """An application that answers these words to everything; its import path."""
    (directory / f"{module}.py").write_text(APP.replace("WORDS", words))
    return f"{module}:app"


def environment(cluster: LiveCluster, directory: Path) -> dict[str, str]:
    """What `shoal env` gives a person whose modules lie in this directory."""
    paths = f"{directory}:{cluster.environment['PYTHONPATH']}"
    return {**cluster.environment, "PYTHONPATH": paths}


def serve_command(cluster: LiveCluster, directory: Path, *arguments: str) -> str:
    """Run a command of `serve` to its end; what it says."""
    done = subprocess.run(
        [str(TOOLS / "serve"), *arguments],
        env=environment(cluster, directory),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STOP_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextmanager
def serve_run(
    cluster: LiveCluster, directory: Path, target: str, *arguments: str, url: str | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`serve run TARGET`, from when its application answers; at the end Ctrl-C ends it, unless it has ended.

    Args:
        url: where it answers. Default: the root of Serve's proxy.
    """
    log = directory / f"serve-run-{time.monotonic_ns()}.log"
    with log.open("w") as output:
        program = subprocess.Popen(
            [str(TOOLS / "serve"), "run", target, *arguments],
            env=environment(cluster, directory),
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        place = url or cluster.record.serve_url

        def answers() -> bool:
            assert program.poll() is None, log.read_text()
            return get(place) is not None

        eventually(answers, READY_S)
        eventually(lambda: f"ready at {cluster.record.serve_url}" in log.read_text())
        yield program
    finally:
        interrupt(program)


def interrupt(program: subprocess.Popen[str]) -> None:
    """Ctrl-C, and wait for the end."""
    if program.poll() is None:
        program.send_signal(signal.SIGINT)
        program.wait(STOP_S)


def listens(url: str) -> bool:
    """Whether anybody answers there, if only that there is nothing to serve yet."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/-/healthz", timeout=5).status_code in (200, 503)
    return False


def get(url: str) -> str | None:
    """What is answered there; None where nobody answers, or with an error."""
    with suppress(httpx.TransportError):
        answer = httpx.get(url, timeout=5)
        return answer.text if answer.status_code == 200 else None
    return None
