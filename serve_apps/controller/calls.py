"""What the controller has begun in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Calls:
    """Calls of Serve, and probes, that nobody waits for; at most one of a kind for each Serve application.

    Args:
        on_end: called whenever one has ended.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __contains__(self, call: tuple[str, str]) -> bool:
        """Whether this kind of call, of this application, has not been seen to end."""
        return call in self._tasks

    def begin(self, kind: str, application: str, work: Coroutine[Any, Any, None]) -> None:
        """Do something, unless it is being done; what goes wrong is logged."""
        if (kind, application) in self._tasks:
            work.close()
            return

        def ended(done: asyncio.Task[None]) -> None:
            if not done.cancelled() and done.exception() is not None:
                logger.error("%s %s failed", kind, application, exc_info=done.exception())
            self._on_end()

        task = self._tasks[kind, application] = asyncio.create_task(work)
        task.add_done_callback(ended)

    async def until_ended(self, kind: str, timeout_s: float) -> None:
        """Wait for those of this kind that have been begun, but not for ever."""
        if tasks := [task for (begun, _), task in self._tasks.items() if begun == kind]:
            await asyncio.wait(tasks, timeout=timeout_s)

    def take_ended(self) -> bool:
        """Forget those that have ended; whether there were any."""
        ended = [call for call, task in self._tasks.items() if task.done()]
        for call in ended:
            del self._tasks[call]
        return bool(ended)
