"""An engine without devices, whose weights wait in the memory of its node for the next want."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_apps.replica.engine_processes import EngineProcesses
from serve_apps.spec import AppSpec


@dataclass(eq=False)
class ParkedEngine:
    """One, as the replica has it that had it.

    Attributes:
        spec, revision: what it has loaded.
        node: the id of its node.
        since: when it was parked, ISO 8601 in UTC.
        bytes: memory that its processes take, pages that they share with others by their share.
        most_bytes: what all parked engines of the node may take.
    """

    engine: EngineProcesses
    spec: AppSpec
    revision: int
    node: str
    since: str
    bytes: int
    most_bytes: int
    _watching: asyncio.Task[None] | None = field(default=None, init=False)

    def facts(self) -> dict[str, Any]:
        """What the controller is told of it."""
        names = ("node", "revision", "since", "bytes", "most_bytes")
        return {name: getattr(self, name) for name in names}

    def watch(self, on_end: Callable[[ParkedEngine, str], None]) -> None:
        """Call this when it ends by itself, and with it whatever is left of its processes."""

        async def wait() -> None:
            why = await self.engine.ended()
            on_end(self, why)
            await self.engine.stop(gently=False)

        self._watching = asyncio.create_task(wait())

    async def wake(
        self, revision: int, devices: Coroutine[Any, Any, Mapping[str, str]], *, early: bool
    ) -> int:
        """Go on, see `EngineProcesses.wake`."""
        self._watch_no_more()
        return await self.engine.wake(revision, devices, early=early)

    async def end(self) -> None:
        """End its processes."""
        self._watch_no_more()
        await self.engine.stop(gently=False)

    def _watch_no_more(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
