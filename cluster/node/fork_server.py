"""Forks processes of one owner out of one that has imported everything: `python -m cluster.node.fork_server`.

Torch, transformers and what is built on them take seconds to import, on every core that a node has; a fork
has them at once, and shares their memory. multiprocessing's own fork server runs its caller's main module
again in every child (that of a Ray worker), and leaves files behind when it is killed.

No Ray in here, and no thread before a fork: neither would survive it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cluster.node import sessions
from cluster.node.surroundings import show_title

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.05


@dataclass(frozen=True)
class _Child:
    """A process that was asked for.

    Attributes:
        number: of the request.
        kills_before: for want of memory, before it was there.
    """

    number: int
    pid: int
    kills_before: int


class ForkServer:
    """Answers requests, one JSON document a line, until the other end of the socket is closed.

    An empty document says first that it is ready. `{"id", "function", "arguments"}` asks for a process that
    calls a function (`module:name`) with named arguments, and has the `title` that is given; `{"kill": id}`
    kills one. The answers are
    `{"id", "pid"}` and, when it has ended, `{"id", "code", "memory", "left"}`: its exit code, or minus a
    signal, whether the kernel has killed something on this node for want of memory while it ran, and how many
    of its processes have not ended. What
    a process leaves behind is killed with it, and its end is told when that has ended too, or does not for
    `cluster.node.sessions.DEATH_S`. All processes are killed when this one ends.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._unread = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._leaving: dict[_Child, float] = {}
        """Processes that have ended, and until when those that they have left behind are waited for."""

    def serve(self) -> None:
        self._answer()
        while True:
            for key, _ in self._selector.select(_LOOK_S if self._leaving else None):
                if key.data is not None:
                    self._clear_up(key.fd, key.data)
                elif not self._read():
                    return
            for child, until in tuple(self._leaving.items()):
                self._report(child, until)

    def _read(self) -> bool:
        """Fork as asked; False at the end of the requests."""
        try:
            received = self._requests.recv(65536)
        except ConnectionResetError:  # whoever asked was killed before it had read every answer
            return False
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "kill" in request:
                self._kill(request["kill"])
            else:
                self._fork(request)
        return bool(received)

    def _fork(self, request: dict[str, Any]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(server, self._requests, request)
        self._answer(id=request["id"], pid=pid)
        child = _Child(request["id"], pid, out_of_memory_kills())
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, child)

    def _kill(self, number: int) -> None:
        """Kill a process that was asked for, unless it has ended; its end is told as any other."""
        for key in tuple(self._selector.get_map().values()):
            if isinstance(key.data, _Child) and key.data.number == number:
                os.kill(key.data.pid, signal.SIGKILL)  # not reaped yet, so that the number is still its own

    def _clear_up(self, descriptor: int, child: _Child) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        # Before its number is free again: those that it has started, and left behind, go with it.
        sessions.kill(child.pid)
        self._leaving[child] = time.monotonic() + sessions.DEATH_S

    def _report(self, child: _Child, until: float) -> None:
        """Tell that a process has ended, once nothing of it can hold a device any more."""
        left = sessions.living(child.pid)
        if left and time.monotonic() < until:
            return
        del self._leaving[child]
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        memory = out_of_memory_kills() > child.kills_before
        self._answer(id=child.number, code=code, memory=memory, left=len(left))

    def _answer(self, **facts: int) -> None:
        self._requests.sendall(json.dumps(facts).encode() + b"\n")


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed since its start because memory ran out."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return 0


def _become(server: int, requests: socket.socket, request: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        # One that is stopped or hangs must not outlive whoever could kill it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        os.setsid()  # a process group of its own: whatever it starts can be ended with it
        requests.close()
        random.seed()  # forks would all draw the same
        if request.get("title"):
            show_title(request["title"])
        module, _, name = request["function"].partition(":")
        getattr(importlib.import_module(module), name)(**request["arguments"])
        code = 0
    except BaseException:  # noqa: BLE001  (nothing may run on into the server's own loop)
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = json.loads(sys.argv[2])  # that of whoever started it: packages may lie anywhere
    for module in sys.argv[3:]:
        importlib.import_module(module)
    settle()
    ForkServer(requests).serve()


def settle() -> None:
    """Everything is imported: no collection in a child has to copy what all share."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
