"""Stands on a host for as long as its node does: starts Ray, ends with it, and ends it.

    python -m cluster.hosts.ssh.supervisor DIRECTORY

It outlives the connection that has started it. Ray's processes become its children when `ray start` has
ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from cluster.hosts.processes import end_cluster
from cluster.hosts.ssh.node_start import LOCK_FILE, START_FILE, STATUS_FILE
from cluster.ray_private import RAYLET
from cluster.state.state_directory import write_private

LOOK_EVERY_S = 0.5
_SET_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux' prctl(2)."""


def supervise(directory: Path) -> int:
    """Start a node and stay with it; the exit code."""
    known = json.loads((directory / START_FILE).read_text(encoding="utf-8"))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    with _only_one(directory):
        _note(directory, "starting")
        ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            code = _start(known)
            raylet = _raylet() if code == 0 else None
            if raylet is None:
                print(f"`ray start` has ended with exit code {code}", flush=True)
                _note(directory, "failed")
                return 1
            _note(directory, "up")
            while not ended.wait(LOOK_EVERY_S):
                _reap()
                if not raylet.is_running():
                    print("the node has ended by itself: its raylet is gone", flush=True)
                    return 1
            return 0
        finally:
            end_cluster(known["mark"])


def _start(known: dict[str, Any]) -> int:
    return subprocess.run(
        known["command"], env=known["environment"], stdin=subprocess.DEVNULL, check=False
    ).returncode


def _raylet() -> psutil.Process | None:
    return next((each for each in psutil.Process().children() if each.name() == RAYLET), None)


def _reap() -> None:
    """Let the dead go: a process that nobody waits for stays in the table."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _note(directory: Path, state: str) -> None:
    write_private(directory / STATUS_FILE, json.dumps({"state": state, "supervisor": os.getpid()}))


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Hold the lock that says that the node runs; it goes with this process, however that ends."""
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1])))
