"""Requests are let in as there are places, through whichever gateways they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from serve_apps.gateway import places as module
from serve_apps.gateway.places import Places
from serve_apps.openai.errors import ApiError
from serve_apps.quotas.place_shares import PlaceShares

CAPACITY = 12


class Site:
    """Gateways, and who shares the places out."""

    def __init__(self, gateways: int) -> None:
        self.shares = PlaceShares()
        self.silent = False
        self.asked = 0
        self.gateways = [
            Places(lambda app: CAPACITY, self.line(str(number)), lambda app, filled: None)
            for number in range(gateways)
        ]
        for each in self.gateways:
            each.gateways = gateways

    def line(self, gateway: str) -> Callable[[str, int, int, int], Coroutine[Any, Any, int | None]]:
        async def ask(app: str, filled: int, want: int, capacity: int) -> int | None:
            self.asked += 1
            await asyncio.sleep(0.001)
            if self.silent:
                return None
            return self.shares.share(app, gateway, in_use=filled, want=want, capacity=capacity)

        return ask

    def report(self) -> None:
        """What the gateways say again and again, and are told."""
        for number, each in enumerate(self.gateways):
            each.take_over(
                {
                    app: self.shares.share(app, str(number), in_use=filled, want=want, capacity=capacity)
                    for app, (filled, want, capacity) in each.report().items()
                }
            )


async def let_in(places: Places, number: int, stack: AsyncExitStack) -> int:
    """How many of so many requests at once are let in; they stay until the stack ends."""

    async def come() -> bool:
        try:
            await stack.enter_async_context(places.hold("chat", 1))
        except ApiError as error:
            if error.code != "queue_full":
                raise
            return False
        return True

    return sum(await asyncio.gather(*(come() for _ in range(number))))


def test_a_gateway_alone_asks_nobody() -> None:
    async def go() -> None:
        places = Places(lambda app: CAPACITY, None, lambda app, filled: None)
        async with AsyncExitStack() as stack:
            assert await let_in(places, 20, stack) == CAPACITY
        async with AsyncExitStack() as stack:
            assert await let_in(places, 20, stack) == CAPACITY
        assert places.report() == {}

    asyncio.run(go())


def test_all_places_are_there_through_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.05)

    async def go() -> None:
        site = Site(3)
        async with AsyncExitStack() as stack:
            assert await let_in(site.gateways[0], 20, stack) == CAPACITY
            assert await let_in(site.gateways[1], 5, stack) == 0
        assert site.asked < 20, "those that come together ask together"

    asyncio.run(go())


def test_who_is_busy_gives_up_places_that_others_want() -> None:
    async def go() -> None:
        site = Site(2)
        async with AsyncExitStack() as busy, AsyncExitStack() as other:
            assert await let_in(site.gateways[0], CAPACITY, busy) == CAPACITY
            waiting = asyncio.create_task(let_in(site.gateways[1], 4, other))
            await asyncio.sleep(0.05)
            await busy.aclose()
            site.report()
            assert await waiting == 4

    asyncio.run(go())


def test_a_gateway_with_little_to_do_asks_nobody() -> None:
    async def go() -> int:
        site = Site(2)
        for each in site.gateways:
            each._capacity = lambda app: 100
        async with AsyncExitStack() as stack:
            await let_in(site.gateways[0], 1, stack)
        site.report()
        before = site.asked
        for _ in range(20):
            async with AsyncExitStack() as stack:
                assert await let_in(site.gateways[0], 1, stack) == 1
            site.report()
        return site.asked - before

    assert asyncio.run(go()) == 0


def test_while_nobody_shares_them_out_each_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.05)

    async def go() -> None:
        site = Site(3)
        site.silent = True
        async with AsyncExitStack() as stack:
            assert [await let_in(each, 20, stack) for each in site.gateways] == [4, 4, 4]

    asyncio.run(go())


def test_no_more_wait_than_there_could_be_room_for() -> None:
    async def go() -> None:
        site = Site(2)
        async with AsyncExitStack() as stack:
            assert await let_in(site.gateways[0], CAPACITY, stack) == CAPACITY
            waiting = [asyncio.create_task(let_in(site.gateways[1], 1, stack)) for _ in range(100)]
            await asyncio.sleep(0.1)
            assert sum(task.done() for task in waiting) == 100 - CAPACITY
            assert sum(await asyncio.gather(*waiting)) == 0

    asyncio.run(go())
