"""Stands on a host for as long as its node does: starts Ray, ends with it, and ends it.

    python -m cluster.hosts.on_host.supervisor DIRECTORY

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from cluster.errors import RequestError
from cluster.hosts.on_host.host_ports import HostPorts, choose_places
from cluster.hosts.on_host.node_start import (
    LOCK_FILE,
    START_FILE,
    STATE,
    STATUS_FILE,
    NodeTask,
    ray_command,
    ray_environment,
)
from cluster.hosts.processes import end_cluster
from cluster.ray_private import RAYLET
from cluster.state.state_directory import write_private

LOOK_EVERY_S = 0.5
_SET_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux' prctl(2)."""


def supervise(
    directory: Path, ended: threading.Event, tell: Callable[[str, Mapping[str, Any]], None] = lambda *_: None
) -> int:
    """Start a node and stay with it until it ends by itself or is to; the exit code.

    Args:
        directory: the node's, in which `prepare` has written what it is to be.
        ended: set when it is to end.
        tell: takes its state when that changes (`starting`, `up`, `failed`), and what is told of the node.
    """
    known = json.loads((directory / START_FILE).read_text(encoding="utf-8"))
    ports = HostPorts()
    told: dict[str, Any] = {}

    def note(state: str, refused: str | None = None) -> None:
        status = {"state": state, "refused": refused, "supervisor": os.getpid()}
        write_private(directory / STATUS_FILE, json.dumps(status))
        tell(state, told)

    with _only_one(directory):
        note("starting")
        ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            known |= _settled(NodeTask(**known["task"]), known["login"], directory, ports)
            told |= known["told"]
            write_private(directory / START_FILE, json.dumps(known))
            code = _start(known)
            raylet = _raylet() if code == 0 else None
            if raylet is None:
                print(f"`ray start` has ended with exit code {code}", flush=True)
                note("failed")
                return 1
            note("up")
            while not ended.wait(LOOK_EVERY_S):
                _reap()
                if not raylet.is_running():
                    print("the node has ended by itself: its raylet is gone", flush=True)
                    return 1
            return 0
        except RequestError as error:
            print(error, flush=True)
            note("failed", str(error))
            return error.exit_code
        finally:
            end_cluster(known["mark"])
            ports.release()


def _settled(task: NodeTask, login: Mapping[str, str], directory: Path, ports: HostPorts) -> dict[str, Any]:
    """How Ray is started, and what is told of it: {"command", "environment", "told"}.

    Raises:
        RequestError: a place that the config names is taken.
    """
    places, gcs_address = None, task.head
    if task.head is None:
        places = choose_places(ports, task.address, task.servers, task.on_network)
        gcs_address = f"{task.address}:{places.gcs_port}"
    assert gcs_address is not None, "the head has just chosen it"
    servers = {} if places is None else {key: port for key, (_, port) in places.servers.items()}
    return {
        "command": ray_command(sys.executable, task, directory, places),
        "environment": ray_environment(login, sys.executable, task, directory, gcs_address, places),
        "told": {
            "directory": str(directory),
            "gcs_address": gcs_address,
            "state": str(directory / STATE),
            "servers": servers,
        },
    }


def _start(known: dict[str, Any]) -> int:
    # In a session of its own: a signal to the group of this process is for this process.
    return subprocess.run(
        known["command"],
        env=known["environment"],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    ).returncode


def _raylet() -> psutil.Process | None:
    return next((each for each in psutil.Process().children() if each.name() == RAYLET), None)


def _reap() -> None:
    """Let the dead go: a process that nobody waits for stays in the table."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Hold the lock that says that the node runs; it goes with this process, however that ends."""
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main(directory: Path) -> int:
    """Supervise until a signal says that it is to end."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    return supervise(directory, ended)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
