"""The processes of a replica's engine: all its ranks, forks on one node, which live and end together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from cluster.node.dial import DialAddress, Streams, Switchboard
from cluster.node.forked_processes import CalledProcesses
from cluster.node.node_fork_server import FORKS
from cluster.node.output import OUTPUT, show_output
from serve_apps.engine.engine_table import find_engine
from serve_apps.engine.titles import ENGINE
from serve_apps.replica.engine_line import EngineLine, LineLostError
from serve_apps.spec import AppSpec

logger = logging.getLogger(__name__)

LINE = "line"
"""What rank 0 calls for."""
_PROCESS = "serve_apps.replica.engine_process"
_OWNER = "engine"
STOP_TIMEOUT_S = 30.0
PARK_TIMEOUT_S = 30.0
"""How long it may take to be parked, or to wake: what takes longer is no gain."""
OWN_WORD_S = 2.0
"""How long an engine may take to say why it does not start, or ends, when a rank has ended."""

AskForForks = Callable[[DialAddress], Awaitable[None]]
"""Has a fork server call this address, for processes on the engine's node."""


class EngineProcesses:
    """Started once; what is left of them ends when this process does, on whichever node they are.

    Args:
        replica: the replica's id.
        host: the address of this node at which they call.
        on_lost: called when one of them ends by itself, or says that the engine is broken.
        on_orphans: called with the keys of answers that are kept, since their gateway is gone.
    """

    def __init__(
        self,
        replica: str,
        host: str,
        ask_for_forks: AskForForks,
        *,
        on_lost: Callable[[str], None],
        on_orphans: Callable[[Sequence[str]], None],
    ) -> None:
        self._replica = replica
        self._host = host
        self._ask_for_forks = ask_for_forks
        self._on_lost = on_lost
        self._on_orphans = on_orphans
        self._board = Switchboard(self._take)
        self._forks: CalledProcesses | None = None
        self._line: EngineLine | None = None
        self._called: dict[str, asyncio.Future[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._showing: asyncio.Task[None] | None = None
        self._ready = False
        self._stopping = False
        self._ended: asyncio.Future[str] | None = None
        """Which process has ended by itself, and how."""
        self._silent_looks = 0
        self.statistics: dict[str, Any] = {}
        """The engine's, as it said last."""

    async def start(
        self,
        spec: AppSpec,
        revision: int,
        devices: Coroutine[Any, Any, Mapping[str, str]],
        parks: bool = False,
    ) -> int:
        """Have an engine with this app's model; the context length of that.

        Args:
            parks: it may be parked.
            devices: waited for while everything is made ready that needs none; the variables that show them.

        Raises:
            EngineError, ShoalError: it cannot be loaded.
            LineLostError: a process ended before the engine was ready.
        """
        loop = asyncio.get_running_loop()
        self._app = spec.name
        self._ended = loop.create_future()
        self._called = {FORKS: loop.create_future(), LINE: loop.create_future()}
        waiting = asyncio.create_task(devices)
        try:
            address = await self._board.open(self._host)
            await self._ask_for_forks(address)
            await self._called[FORKS]
            document = spec.as_json()
            self._run(self._rank(0, "run_engine", {"address": address.as_json(), "replica": self._replica}))
            await self._until(self._called[LINE])
            assert self._line is not None
            meet = await self._until(self._line.call("prepare_start", document, revision, parks))
            # Who computes on CPUs needs nothing to be shown, and loads while others are on their way out.
            visible = {} if meet.pop("may_load") else dict(await self._until(waiting))
            if not find_engine(spec.engine).has_own_ranks:
                for rank in range(1, spec.config.ranks):
                    known = {"spec": document, "replica": self._replica, "rank": rank}
                    self._run(self._rank(rank, "run_rank", {**known, **meet, "visible": visible}))
            found = await self._until(self._line.call("start", visible))
            await self._until(waiting)
        finally:
            waiting.cancel()
            self._board.close()
        return self._is_ready(found)

    def _is_ready(self, found: Mapping[str, Any]) -> int:
        # Whoever hears that it is ready hears what it does, too.
        self.beat(found["statistics"])
        self._ready = True
        return int(found["context_length"])

    async def park(self, most_bytes: int | None) -> dict[str, int] | None:
        """Have the engine give its devices back and keep its weights, until `wake`, see `EngineHost.park`.

        Raises:
            EngineError: it broke over it.
            LineLostError: it has ended.
        """
        assert self._line is not None
        async with asyncio.timeout(PARK_TIMEOUT_S):
            taken: dict[str, int] | None = await self._until(self._line.call("park", most_bytes))
        self._ready = taken is None
        return taken

    async def ended(self) -> str:
        """Wait until one of the processes ends by itself, or the engine says that it is broken; which."""
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def wake(
        self, revision: int, devices: Coroutine[Any, Any, Mapping[str, str]], *, early: bool
    ) -> int:
        """Have the engine go on after `park`; what `start` returns.

        Args:
            early: it needs nothing of its devices, and wakes while others are on their way out.

        Raises:
            EngineError: it is not what it was.
            LineLostError: it has ended.
            TimeoutError: it does not say a word.
        """
        assert self._line is not None
        waiting = asyncio.create_task(devices)
        try:
            visible = {} if early else dict(await self._until(waiting))
            async with asyncio.timeout(PARK_TIMEOUT_S):
                found = await self._until(self._line.call("wake", visible, revision))
            await self._until(waiting)
        finally:
            waiting.cancel()
        return self._is_ready(found)

    async def _until(self, waited: Awaitable[Any]) -> Any:
        """What is waited for; that a rank has ended, where the engine says nothing of it."""
        assert self._ended is not None
        waiting = asyncio.ensure_future(waited)
        try:
            await _first(waiting, self._ended)
            await asyncio.wait({waiting}, timeout=OWN_WORD_S)
            if not waiting.done():
                raise LineLostError(self._ended.result())
            try:
                return waiting.result()
            except LineLostError as error:
                await asyncio.wait({self._ended}, timeout=OWN_WORD_S)
                if self._ended.done():
                    raise LineLostError(self._ended.result()) from error
                raise
        finally:
            waiting.cancel()

    def _take(self, purpose: str, streams: Streams) -> None:
        """Somebody with the key calls."""
        if purpose == OUTPUT and self._showing is None:
            self._showing = asyncio.create_task(show_output(streams))
            return
        called = self._called.get(purpose)
        if called is None or called.done():
            streams[1].close()
            return
        if purpose == FORKS:
            self._forks = CalledProcesses(streams)
        else:
            self._line = EngineLine(*streams, self)
            self._run(self._line.run())
        called.set_result(None)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _rank(self, rank: int, function: str, arguments: dict[str, Any]) -> None:
        """Run the process of a rank to its end; the others end with it."""
        assert self._forks is not None
        assert self._ended is not None
        try:
            title = f"{ENGINE}{self._app}:{self._replica}:rank {rank}"
            end = await self._forks.run(_OWNER, f"{_PROCESS}:{function}", arguments, title)
            why = f"rank {rank} ended: {end}"
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
        """The processes of the ranks on their node, by rank."""
        return [] if self._forks is None else self._forks.pids(_OWNER)

    def look(self) -> int:
        """Count one more look without a word of the engine; how many there were since the last one."""
        self._silent_looks += 1
        return self._silent_looks - 1

    @property
    def silent_looks(self) -> int:
        """How many looks there were since the engine was heard."""
        return self._silent_looks

    async def kill(self) -> None:
        """Have the processes end at once, those that hang too; what they said last is shown."""
        self._stopping = True
        if self._forks is not None:
            self._forks.kill(_OWNER)
            await asyncio.wait({asyncio.create_task(self._forks.end(_OWNER))}, timeout=OWN_WORD_S)
            await self._forks.close()
        if self._showing is not None:
            await asyncio.wait({self._showing}, timeout=OWN_WORD_S)

    async def stop(self, *, gently: bool = True) -> None:
        """End the engine, and then its processes; when this returns, its devices are free.

        Args:
            gently: its requests are ended first.
        """
        self._stopping = True
        if gently:
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self.call("stop")
            except TimeoutError:
                logger.warning("the engine of replica %s did not end by itself", self._replica)
            except LineLostError:
                pass  # it has ended
        if self._line is not None:
            self._line.close()  # rank 0 ends
        if self._forks is not None:
            await self._forks.end(_OWNER)
            await self._forks.close()

    # What the engine tells.

    def beat(self, statistics: dict[str, Any]) -> None:
        self.statistics, self._silent_looks = statistics, 0

    def lost(self, why: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(why)
        if self._ready:
            self._on_lost(why)

    def tell_orphans(self, keys: Sequence[str]) -> None:
        self._on_orphans(keys)


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of these is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
