"""The processes that one owner has on its node: forks of a server that has imported everything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cluster.node.dial import Streams
from cluster.node.node_fork_server import send_hello
from cluster.node.sessions import DEATH_S
from cluster.node.surroundings import Surroundings, path_with

FOR_FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""What the environment of a fork server has: asking the driver whether there are GPUs would make CUDA
unusable after a fork."""
_LOOK_S = 0.05
_KEPT_S = 60.0
"""How long the node's fork server is waited for where somebody sees to it that there is one."""


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


class ForkedProcesses:
    """Those of one owner; they end with the process that has made this object, at the latest.

    They are forks of the node's fork server (cluster.node.node_agent). Where there is none, or this process
    has other packages or another environment than that, they are forks of one of their own.

    Args:
        preloaded: modules that the processes need, whatever they do.
        address: where the node's fork server listens, see `surroundings.address_here`; None: there is none.
        is_kept: whether somebody sees to it that there is one, so that it is waited for.
        variables: of the processes' environment, beside that of this process.
        title: what they are, for people who look at processes.
    """

    def __init__(
        self,
        preloaded: Sequence[str],
        address: str | None = None,
        is_kept: Callable[[], bool] = lambda: False,
        variables: Mapping[str, str] = MappingProxyType({}),
        title: str = "",
    ) -> None:
        self._preloaded = preloaded
        self._title = title
        self._variables = variables
        self._address = address
        self._is_kept = is_kept
        self._connection: socket.socket | None = None
        """To the node's fork server, until it has answered."""
        self._writer: asyncio.StreamWriter | None = None
        self._server: subprocess.Popen[bytes] | None = None
        """One of its own."""
        self._forks: dict[int, _Fork] = {}
        self._next = 0
        self._starting = asyncio.Lock()
        self._ready = asyncio.Event()

    async def start(self) -> None:
        """Wait until everything that the processes need is imported."""
        await self._requests()
        await self._ready.wait()

    async def run(
        self, owner: str, function: str, arguments: Mapping[str, Any], title: str = ""
    ) -> ProcessEnd:
        """Run a function in a process of its own to its end.

        Args:
            owner: whose process it is, for `end` and `give_up`.
            function: as `module:name`.
            arguments: what it is called with, which JSON can hold.
            title: its command line, for people; that of its server by default.

        Raises:
            ConnectionError: the fork server has ended, and the process with it.
        """
        self._next += 1
        number = self._next
        fork = self._forks[number] = _Fork(owner, asyncio.get_running_loop().create_future())
        requests = await self._requests()
        if number in self._forks:  # nobody has given it up meanwhile
            request = {"id": number, "function": function, "arguments": arguments, "title": title}
            requests.write(json.dumps(request).encode() + b"\n")
        return await fork.ended

    async def end(self, owner: str) -> None:
        """Kill what is left of an owner's processes, even what is stopped, and wait for their ends."""
        left = self.kill(owner)
        await asyncio.gather(*(fork.ended for fork in left), return_exceptions=True)

    def kill(self, owner: str) -> list[_Fork]:
        """The same, without waiting; those that were killed."""
        left = [each for each in self._forks.items() if each[1].owner == owner and each[1].pid is not None]
        for number, fork in left:
            self._kill(number, fork)
        return [fork for _, fork in left]

    def _kill(self, number: int, fork: _Fork) -> None:
        """Kill one that has a process, also where what has forked it does not move."""
        assert fork.pid is not None, "it was looked at"
        os.kill(fork.pid, signal.SIGKILL)  # not reaped yet, so that the number is still its own

    def pids(self, owner: str) -> list[int]:
        """An owner's processes, in the order in which they were asked for; those that are there."""
        return [each.pid for each in self._forks.values() if each.owner == owner and each.pid is not None]

    async def give_up(self, owner: str) -> None:
        """Kill an owner's processes that never said a word; where there are none yet, what is to fork them
        does not move, and is left for another one."""
        for number, fork in [each for each in self._forks.items() if each[1].owner == owner]:
            if fork.pid is not None:
                self._kill(number, fork)
            elif self._server is not None:
                self._server.kill()  # another one is started for whoever asks next
            else:
                self._forks.pop(number, None)
                self._lose([fork])
                self._leave_the_nodes()

    def _leave_the_nodes(self) -> None:
        """Have a fork server of one's own from now on."""
        self._do_without("it does not answer")
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # whoever reads from it sees its end

    async def close(self) -> None:
        """End all processes, and what was to fork them."""
        if self._writer is not None:
            self._writer.close()
            await self._listening

    async def hears(self) -> None:
        """Answer at once, whatever else goes on."""

    def died(self, owner: str) -> None:
        """A process of this owner has ended before its time; for whoever derives from this class."""

    async def _requests(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._writer is None:
                self._ready.clear()
                reader, self._writer = await self._open()
                self._listening = asyncio.create_task(self._listen(reader, self._writer))
            return self._writer

    async def _open(self) -> Streams:
        """What forks for this owner, and answers when it is ready."""
        return await self._reach_the_nodes() or await self._start_own()

    async def _reach_the_nodes(self) -> Streams | None:
        """A connection to a fork of the node's fork server; None where there is none for this owner."""
        until = time.monotonic() + _KEPT_S
        while self._address is not None:
            try:
                connection = self._connection = connect(self._address)
            except OSError:
                if time.monotonic() > until or not await asyncio.to_thread(self._is_kept):
                    return None
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                await asyncio.to_thread(
                    send_hello, connection, Surroundings.here(self._variables, self._title), 1, 2
                )
                streams = await asyncio.open_connection(sock=connection)
                answer = await streams[0].readline()  # once everything is imported
            except OSError:
                answer = b""
            if answer == b"{}\n":
                self._ready.set()
                return streams
            connection.close()
            if answer:
                self._do_without(json.loads(answer)["refused"])
        return None

    def _do_without(self, why: str) -> None:
        self._address = None
        for_what = f" for {self._title}" if self._title else ""
        print(f"the node's fork server is not used{for_what}: {why}; another one is started", flush=True)

    async def _start_own(self) -> Streams:
        ours, theirs = socket.socketpair()
        program = [sys.executable, "-m", "cluster.node.fork_server", str(theirs.fileno())]
        self._server = subprocess.Popen(
            [*program, json.dumps(path_with(self._variables)), *self._preloaded],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self._variables, **FOR_FORKS},
        )
        theirs.close()
        return await asyncio.open_connection(sock=ours)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # One that is killed before it has read a request resets the connection instead of closing it.
        with suppress(ConnectionError):
            while line := await reader.readline():
                self._hear(json.loads(line))
        writer.close()
        self._writer = self._connection = None  # whoever asks next starts another one
        self._ready.set()  # nobody may wait for ever for one that ended while it imported
        lost, self._forks = self._forks, {}
        server, self._server = self._server, None
        self._lose(lost.values())
        if server is not None:
            await asyncio.to_thread(server.wait)  # no zombie may stay

    def _lose(self, forks: Iterable[_Fork]) -> None:
        for fork in forks:
            self.died(fork.owner)
            if not fork.ended.done():  # who waited may have been cancelled
                fork.ended.set_exception(ConnectionError("the fork server of the node has ended"))

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
            if not fork.ended.done():
                fork.ended.set_result(end)


class CalledProcesses(ForkedProcesses):
    """Those of an owner that a fork server has called, from whichever node that is on (cluster.node.dial)."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(())
        self._streams: Streams | None = streams

    async def _open(self) -> Streams:
        streams, self._streams = self._streams, None
        if streams is None:
            raise ConnectionError("the fork server has ended")
        return streams

    def _kill(self, number: int, fork: _Fork) -> None:
        """Have it killed by what has forked it: it may be on another node."""
        if self._writer is not None:
            self._writer.write(json.dumps({"kill": number}).encode() + b"\n")


def connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)  # where many wait already, one tries again
        connection.connect(address)
        connection.setblocking(True)
    except BaseException:
        connection.close()
        raise
    return connection
