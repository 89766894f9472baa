"""The end of a forked process is told when all that it has started has ended too."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.node import sessions
from cluster.node.forked_processes import ProcessEnd

MODULE = "tests.cluster.node.left_behind"


class Server:
    """A fork server, asked for one process."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._lines = requests.makefile("rw")
        assert self._answer() == {}

    def fork(self, function: str, **arguments: str) -> None:
        request = {"id": 1, "function": f"{MODULE}:{function}", "arguments": arguments}
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        assert self._answer().keys() == {"id", "pid"}

    def end(self) -> dict[str, Any]:
        return self._answer()

    def is_silent(self, seconds: float) -> bool:
        """Whether it says nothing for so long."""
        self._requests.settimeout(seconds)
        try:
            return not self._requests.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self._requests.settimeout(None)

    def _answer(self) -> dict[str, Any]:
        return json.loads(self._lines.readline())


@contextmanager
def serving(**environment: str) -> Iterator[Server]:
    ours, theirs = socket.socketpair()
    program = [sys.executable, "-m", "cluster.node.fork_server", str(theirs.fileno()), json.dumps(sys.path)]
    process = subprocess.Popen(
        [*program, MODULE], pass_fds=[theirs.fileno()], env={**os.environ, **environment}
    )
    theirs.close()
    with process, ours:
        server = Server(ours)
        try:
            yield server
        finally:
            ours.shutdown(socket.SHUT_RDWR)


def test_what_a_process_leaves_behind_has_ended_when_its_end_is_told(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with serving() as server:
        server.fork("leave_two", pids=str(pids))
        assert server.end() == {"id": 1, "code": 3, "memory": False, "left": 0}
        assert [sessions.has_ended(pid) for pid in json.loads(pids.read_text())] == [True, True]


def test_an_end_is_not_told_while_something_of_it_is_there(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    with serving(HELD=str(held), DEATH_S="600") as server:
        server.fork("end_at_once")
        assert server.is_silent(0.3)
        held.unlink()
        assert server.end() == {"id": 1, "code": 0, "memory": False, "left": 0}


def test_of_what_does_not_end_that_is_said(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    with serving(HELD=str(held), DEATH_S="0.1") as server:
        server.fork("end_at_once")
        assert server.end() == {"id": 1, "code": 0, "memory": False, "left": 1}
    said = "; 30 s after it 1 of the processes it had started had not ended"
    assert str(ProcessEnd(0, False, 1)) == f"exit code 0{said}"
    assert str(ProcessEnd(-9, True, 1)) == f"killed by SIGKILL; its node was running low on memory{said}"


def test_of_a_session_those_are_seen_that_have_not_ended_whoever_their_parent_is() -> None:
    begin = "import os, subprocess, sys; print(subprocess.Popen(['sleep', '600'], stdout=2).pid, flush=True)"
    command = [sys.executable, "-c", f"{begin}; os.read(0, 1)"]
    leader = subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert leader.stdout is not None
    with leader:
        child = int(leader.stdout.readline())
        assert sorted(sessions.living(leader.pid)) == sorted((leader.pid, child))
        leader.kill()
        while not sessions.has_ended(leader.pid):
            pass
        assert sessions.living(leader.pid) == [child], "the first is not waited for yet, and holds nothing"
        os.kill(child, signal.SIGKILL)
        while not sessions.has_ended(child):
            pass
        assert sessions.living(leader.pid) == []
