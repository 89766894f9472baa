"""Threads for what the controller asks of others, so that nobody who is slow holds up the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

MOST_CALLS = 64
"""Calls of Serve that run at the same time; one that deletes an application takes as long as its requests."""

Result = TypeVar("Result")


class Threads:
    """One thread that looks at Serve, one for the broker, one that asks the registry, one that writes for
    each app, and many for calls of Serve.

    asyncio's own are few, and shared by all.
    """

    def __init__(self) -> None:
        self._looking = ThreadPoolExecutor(1, "look")
        self._seeing = ThreadPoolExecutor(1, "see")
        self._registry = ThreadPoolExecutor(1, "registry")
        self._serve = ThreadPoolExecutor(MOST_CALLS, "serve")
        self._storing: dict[str, ThreadPoolExecutor] = {}

    async def look(self, work: Callable[[], Result]) -> Result:
        """Tell the broker what all apps want."""
        return await asyncio.wrap_future(self._looking.submit(work))

    async def see(self, work: Callable[[], Result]) -> Result:
        """Look at Serve."""
        return await asyncio.wrap_future(self._seeing.submit(work))

    async def ask_registry(self, work: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._registry.submit(work))

    async def call_serve(self, work: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._serve.submit(work))

    def store(self, app: str, work: Callable[[], Result]) -> Future[Result]:
        """Write what is remembered of an app, after what was to be written of it before."""
        if app not in self._storing:
            self._storing[app] = ThreadPoolExecutor(1, f"store-{app}")
        return self._storing[app].submit(work)

    def forget(self, app: str) -> None:
        """An app is gone; what is to be written of it still is."""
        pool = self._storing.pop(app, None)
        if pool is not None:
            pool.shutdown(wait=False)
