"""One function in a forked process, for those who have no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from cluster.node.forked_processes import ForkedProcesses, ProcessEnd

_OWNER = "call"


class ForkedCall:
    """Runs from the start to the end of a `with`, at whose end what is left of it is killed.

    Args:
        make: makes the owner of the process; it is called in a thread of its own.
        function, arguments: see `ForkedProcesses.run`.
    """

    def __init__(
        self, make: Callable[[], ForkedProcesses], function: str, arguments: Mapping[str, Any]
    ) -> None:
        self._make = make
        self._function = function
        self._arguments = arguments
        self._over: asyncio.Event | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="forked call", daemon=True)
        self.end: Future[ProcessEnd] = Future()
        """How it has ended; a ConnectionError where what was to fork it has."""

    def __enter__(self) -> ForkedCall:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._leave)
        self._thread.join()

    def _leave(self) -> None:
        if self._over is not None:
            self._over.set()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._call())

    async def _call(self) -> None:
        self._over = asyncio.Event()
        forks = self._make()
        running = asyncio.create_task(forks.run(_OWNER, self._function, self._arguments))
        running.add_done_callback(self._ended)
        await self._over.wait()
        await forks.end(_OWNER)
        await forks.close()
        running.cancel()

    def _ended(self, running: asyncio.Task[ProcessEnd]) -> None:
        if running.cancelled():
            self.end.cancel()
        elif (error := running.exception()) is not None:
            self.end.set_exception(error)
        else:
            self.end.set_result(running.result())
