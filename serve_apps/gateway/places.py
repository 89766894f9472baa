"""The places in apps that this gateway may fill: all of them, or its share among several gateways."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from serve_apps.openai.errors import queue_full

WAIT_S = 0.6
"""How long a request waits for places that other gateways may give up: they say what they have twice a
second."""
ASK_EVERY_S = 0.02
SPARE = 0.25
"""What a gateway wants beside what it has filled, as a part of that."""
MOST_IDLE = 4
IDLE_PARTS = 16
"""All gateways together keep one place in so many while they have nothing to do, and none more than
MOST_IDLE."""

AskShare = Callable[[str, int, int, int], Awaitable[int | None]]
"""A gateway's share of an app's places, by the app, how many it has filled, how many it would fill, and how
many there are; None: nobody answers."""


class Places:
    """Counts what is filled, by app.

    Args:
        capacity: how many places an app has, over all gateways.
        ask_share: asks for more; None: there is no other gateway.
        changed: is told of each change: the app, and how many are filled.
    """

    def __init__(
        self,
        capacity: Callable[[str], int],
        ask_share: AskShare | None,
        changed: Callable[[str, int], None],
    ) -> None:
        self.gateways = 1
        """How many there are."""
        self._capacity = capacity
        self._ask_share = ask_share
        self._changed = changed
        self._filled: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._shares: dict[str, int] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def hold(self, app: str, number: int) -> AsyncIterator[None]:
        """Fill places while a request runs or waits.

        Raises:
            ApiError: 429, there are not so many.
        """
        if not self._has(app, number):
            await self._wait(app, number)
        self._fill(app, number)
        try:
            yield
        finally:
            self._fill(app, -number)

    def report(self) -> dict[str, tuple[int, int, int]]:
        """By app: how many are filled, how many would be, and how many there are."""
        if self._ask_share is None:
            return {}
        apps = {*(app for app, filled in self._filled.items() if filled), *self._shares}
        return {app: (self._filled[app], self._want(app), self._capacity(app)) for app in apps}

    def take_over(self, shares: Mapping[str, int]) -> None:
        """Go by these shares from now on."""
        self._shares = dict(shares)

    def _has(self, app: str, number: int) -> bool:
        most = self._capacity(app)
        if self._ask_share is not None:
            most = min(most, self._shares.get(app, 0))
        return self._filled[app] + number <= most

    async def _wait(self, app: str, number: int) -> None:
        # No more wait than there could ever be room for.
        if self._ask_share is None or self._waiting[app] + number > self._capacity(app):
            raise queue_full(app)
        until = asyncio.get_running_loop().time() + WAIT_S
        self._waiting[app] += number
        try:
            while True:
                await self._ask(app)
                if self._has(app, number):
                    return
                if asyncio.get_running_loop().time() >= until:
                    raise queue_full(app)
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            self._waiting[app] -= number

    async def _ask(self, app: str) -> None:
        """Ask once for all that wait."""
        task = self._asking.get(app)
        if task is None:
            task = self._asking[app] = asyncio.create_task(self._ask_now(app))
            task.add_done_callback(lambda _: self._asking.pop(app, None))
        await asyncio.shield(task)

    async def _ask_now(self, app: str) -> None:
        assert self._ask_share is not None
        capacity = self._capacity(app)
        share = await self._ask_share(app, self._filled[app], self._want(app), capacity)
        # While nobody shares them out each has its part.
        self._shares[app] = capacity // max(1, self.gateways) if share is None else share

    def _want(self, app: str) -> int:
        filled = self._filled[app]
        # One that has nothing to do keeps few, for which its next requests need not ask.
        idle = min(MOST_IDLE, self._capacity(app) // (IDLE_PARTS * max(1, self.gateways)))
        return filled + self._waiting[app] + max(idle, math.ceil(SPARE * filled))

    def _fill(self, app: str, change: int) -> None:
        self._filled[app] += change
        self._changed(app, self._filled[app])
