"""The processes of a replica's engine: all its ranks, forked on this node, which live and end together."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cluster.node.forked_processes import ForkedProcesses
from cluster.node.surroundings import is_own
from serve_apps.engine.engine_table import find_engine
from serve_apps.engine.meeting_place import MeetingPlace
from serve_apps.replica.engine_line import EngineLine, LineLostError
from serve_apps.spec import AppSpec

logger = logging.getLogger(__name__)

_PROCESS = "serve_apps.replica.engine_process"
_OWNER = "engine"
STOP_TIMEOUT_S = 30.0
OWN_WORD_S = 2.0
"""How long an engine may take to say why it does not start, when a rank has ended."""


class EngineProcesses:
    """Started once; what is left of them ends with this process, however that ends.

    Args:
        replica: the replica's id.
        address, is_kept: see `ForkedProcesses`.
        on_lost: called when one of them ends by itself, or says that the engine is broken.
        on_orphans: called with the keys of answers that are kept, since their gateway is gone.
    """

    def __init__(
        self,
        replica: str,
        address: str | None,
        is_kept: Callable[[], bool],
        *,
        on_lost: Callable[[str], None],
        on_orphans: Callable[[Sequence[str]], None],
    ) -> None:
        self._replica = replica
        self._forked_at = address, is_kept
        self._on_lost = on_lost
        self._on_orphans = on_orphans
        self._forks: ForkedProcesses | None = None
        self._place: MeetingPlace | None = None
        self._line: EngineLine | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._ready = False
        self._stopping = False
        self._ended: asyncio.Future[str] | None = None
        """Which process has ended by itself, and how."""
        self._silent_looks = 0
        self.statistics: dict[str, Any] = {}
        """The engine's, as it said last."""

    async def start(self, spec: AppSpec, revision: int, node: str) -> int:
        """Have an engine with this app's model; the context length of that.

        Args:
            node: the node's address, for messages.

        Raises:
            EngineError, ShoalError: it cannot be loaded.
            LineLostError: a process ended before the engine was ready.
        """
        entry = find_engine(spec.engine)
        self._forks = ForkedProcesses((_PROCESS, *entry.modules), *self._forked_at)
        self._place = MeetingPlace()
        meet = {"host": self._place.host, "port": self._place.port}
        address = f"\0shoal-engine-{secrets.token_hex(16)}"
        loop = asyncio.get_running_loop()
        connected: asyncio.Future[EngineLine] = loop.create_future()
        self._ended = loop.create_future()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if connected.done() or not is_own(writer.get_extra_info("socket")):
                writer.close()
                return
            line = EngineLine(reader, writer, self)
            connected.set_result(line)
            await line.run()

        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        server = await asyncio.start_unix_server(connect, sock=listener)
        document = spec.as_json()
        self._run(self._rank(0, "run_engine", {"address": address, "replica": self._replica}))
        if not entry.has_own_ranks:
            for rank in range(1, spec.config.ranks):
                arguments = {"spec": document, "replica": self._replica, "rank": rank, **meet}
                self._run(self._rank(rank, "run_rank", arguments))
        try:
            await _first(connected, self._ended)
        finally:
            server.close()
        if not connected.done():
            raise LineLostError(self._ended.result())
        self._line = connected.result()
        found = await self._until_started(self._line.call("start", document, revision, node, *meet.values()))
        self._ready = True
        return int(found["context_length"])

    async def _until_started(self, start: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """What the engine says; that a rank has ended, where it says nothing of it."""
        assert self._ended is not None
        starting = asyncio.create_task(start)
        try:
            await _first(starting, self._ended)
            await asyncio.wait({starting}, timeout=OWN_WORD_S)
            if not starting.done():
                raise LineLostError(self._ended.result())
            try:
                return starting.result()
            except LineLostError as error:
                await asyncio.wait({self._ended}, timeout=OWN_WORD_S)
                if self._ended.done():
                    raise LineLostError(self._ended.result()) from error
                raise
        finally:
            starting.cancel()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _rank(self, rank: int, function: str, arguments: dict[str, Any]) -> None:
        """Run the process of a rank to its end; the others end with it."""
        assert self._forks is not None
        assert self._ended is not None
        try:
            why = f"rank {rank} ended: {await self._forks.run(_OWNER, f'{_PROCESS}:{function}', arguments)}"
        except ConnectionError as error:
            why = f"rank {rank} ended: {error}"
        if self._stopping:
            return
        if not self._ended.done():
            self._ended.set_result(why)
        if self._ready:
            self._on_lost(why)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the EngineHost, see `EngineLine.call`."""
        if self._line is None:
            raise LineLostError("there is no engine")
        return await self._line.call(method, *arguments)

    def pids(self) -> list[int]:
        """The processes of the ranks, by rank."""
        return [] if self._forks is None else self._forks.pids(_OWNER)

    def silent_looks(self) -> int:
        """How often this was asked since the engine was heard last."""
        self._silent_looks += 1
        return self._silent_looks - 1

    def kill(self) -> None:
        """End the processes at once, those that hang too."""
        self._stopping = True
        if self._forks is not None:
            self._forks.kill(_OWNER)

    async def stop(self) -> None:
        """End the engine, and then its processes."""
        self._stopping = True
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.call("stop")
        except TimeoutError:
            logger.warning("the engine of replica %s did not end by itself", self._replica)
        finally:
            self.kill()
            if self._forks is not None:
                await self._forks.close()
            if self._place is not None:
                self._place.close()

    # What the engine tells.

    def beat(self, statistics: dict[str, Any]) -> None:
        self.statistics, self._silent_looks = statistics, 0

    def lost(self, why: str) -> None:
        self._on_lost(why)

    def tell_orphans(self, keys: Sequence[str]) -> None:
        self._on_orphans(keys)


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of these is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
