"""The agent of a node: it has processes forked for whoever asks, and sees to their end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cluster.node.sessions import DEATH_S


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended.

    Attributes:
        code: its exit code, or minus the number of a signal.
        out_of_memory: the kernel killed it, or another process of its node meanwhile, for want of memory.
        num_left: how many of the processes that it had started were there still, long after they were killed.
    """

    code: int
    out_of_memory: bool
    num_left: int = 0

    def __str__(self) -> str:
        how = f"exit code {self.code}" if self.code >= 0 else f"killed by {signal.Signals(-self.code).name}"
        if self.out_of_memory and self.code == -signal.SIGKILL:
            how += "; its node was running low on memory"
        if self.num_left:
            how += f"; {DEATH_S:.0f} s after it {self.num_left} of the processes it had started had not ended"
        return how


@dataclass
class _Fork:
    """A process that was asked for."""

    owner: str
    ended: asyncio.Future[ProcessEnd]
    pid: int | None = None


class NodeAgent:
    """Starts processes on its node, out of one that has imported everything (cluster.node.fork_server).

    It runs as an actor held to the node; a process that it has started ends with it at the latest.

    Args:
        preloaded: modules that the processes need, whatever they do.
    """

    def __init__(self, preloaded: Sequence[str]) -> None:
        self._preloaded = preloaded
        self._writer: asyncio.StreamWriter | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._forks: dict[int, _Fork] = {}
        self._next = 0
        self._starting = asyncio.Lock()
        self._ready = asyncio.Event()

    async def start(self) -> None:
        """Wait until everything that the processes need is imported."""
        await self._requests()
        await self._ready.wait()

    async def run(self, owner: str, function: str, arguments: Mapping[str, Any]) -> ProcessEnd:
        """Run a function in a process of its own to its end.

        Args:
            owner: whose process it is, for `end` and `give_up`.
            function: as `module:name`.
            arguments: what it is called with, which JSON can hold.

        Raises:
            ConnectionError: the fork server has ended, and the process with it.
        """
        requests = await self._requests()
        self._next += 1
        number = self._next
        self._forks[number] = _Fork(owner, asyncio.get_running_loop().create_future())
        request = {"id": number, "function": function, "arguments": arguments}
        requests.write(json.dumps(request).encode() + b"\n")
        return await self._forks[number].ended

    async def end(self, owner: str) -> None:
        """Kill what is left of an owner's processes, even what is stopped."""
        left = [fork for fork in self._forks.values() if fork.owner == owner and fork.pid is not None]
        for fork in left:
            assert fork.pid is not None, "it was looked at"
            os.kill(fork.pid, signal.SIGKILL)  # not reaped yet, so that the number is still its own
        await asyncio.gather(*(fork.ended for fork in left), return_exceptions=True)

    async def give_up(self, owner: str) -> None:
        """Kill an owner's processes that never said a word; where there are none yet, the fork server too."""
        for fork in [each for each in self._forks.values() if each.owner == owner]:
            if fork.pid is not None:
                os.kill(fork.pid, signal.SIGKILL)
            elif self._server is not None:
                self._server.kill()  # another one is started for whoever asks next

    async def hears(self) -> None:
        """Answer at once, whatever else goes on."""

    def died(self, owner: str) -> None:
        """A process of this owner has ended before its time; for whoever derives from this class."""

    async def _requests(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._writer is None:
                self._ready.clear()
                ours, theirs = socket.socketpair()
                program = [sys.executable, "-m", "cluster.node.fork_server", str(theirs.fileno())]
                self._server = subprocess.Popen(
                    [*program, json.dumps(sys.path), *self._preloaded],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # Asking the driver whether there are GPUs would make CUDA unusable after a fork.
                    env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                )
                theirs.close()
                reader, self._writer = await asyncio.open_connection(sock=ours)
                self._listening = asyncio.create_task(self._listen(reader, self._server))
            return self._writer

    async def _listen(self, reader: asyncio.StreamReader, server: subprocess.Popen[bytes]) -> None:
        # One that is killed before it has read a request resets the connection instead of closing it.
        with suppress(ConnectionError):
            while line := await reader.readline():
                self._hear(json.loads(line))
        self._writer = None  # whoever asks next starts another one
        self._ready.set()  # nobody may wait for ever for one that ended while it imported
        lost, self._forks = self._forks, {}
        for fork in lost.values():
            self.died(fork.owner)
            fork.ended.set_exception(ConnectionError("the fork server of the node has ended"))
        await asyncio.to_thread(server.wait)  # no zombie may stay

    def _hear(self, answer: dict[str, Any]) -> None:
        if not answer:
            self._ready.set()
        elif "pid" in answer:
            self._forks[answer["id"]].pid = answer["pid"]
        else:
            end = ProcessEnd(answer["code"], answer["memory"], answer["left"])
            fork = self._forks.pop(answer["id"])
            if end.code:
                self.died(fork.owner)
            fork.ended.set_result(end)
