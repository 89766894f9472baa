"""Where answers are kept whose gateway is gone."""

from __future__ import annotations

import asyncio

from serve_apps.controller.orphans import Orphans
from serve_apps.replica.kept_answers import ORPHAN_S


def test_what_replicas_say_is_found_by_request() -> None:
    async def go() -> None:
        orphans = Orphans()
        orphans.add("chat:1", "r1", ["a/0", "a/1", "b/0"], 0.0)
        orphans.add("chat:1", "r2", ["a/2"], 0.0)
        assert await orphans.find("chat:1", "a", 0.0) == {0: "r1", 1: "r1", 2: "r2"}
        assert await orphans.find("chat:2", "a", 0.0) == {}
        assert await orphans.find("chat:1", "c", 0.0) == {}

    asyncio.run(go())


def test_who_asks_too_early_waits_for_it() -> None:
    async def go() -> None:
        orphans = Orphans()
        asking = asyncio.create_task(orphans.find("chat:1", "a", 5.0))
        await asyncio.sleep(0.01)
        orphans.add("chat:1", "r1", ["b/0"], 0.0)
        await asyncio.sleep(0.01)
        assert not asking.done()
        orphans.add("chat:1", "r1", ["a/0"], 0.0)
        assert await asking == {0: "r1"}

    asyncio.run(go())


def test_it_is_forgotten_when_the_replicas_have_forgotten_it() -> None:
    async def go() -> None:
        orphans = Orphans()
        orphans.add("chat:1", "r1", ["a/0"], 0.0)
        orphans.add("chat:1", "r1", ["b/0"], ORPHAN_S + 1)
        assert await orphans.find("chat:1", "a", 0.0) == {}

    asyncio.run(go())
