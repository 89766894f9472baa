"""What the workers of failed ranks hear, and what the driver hears of them."""

from __future__ import annotations

import asyncio
from typing import cast

from train_jobs.errors import RankError
from train_jobs.group.restarts import LEFT, Restarts
from train_jobs.spec import GroupSpec

NEXT = cast("GroupSpec", "the next attempt")


def error(rank: int) -> RankError:
    return RankError(rank, 7, "KeyError", "'x'", "")


def test_all_who_report_hear_the_verdict_even_those_that_report_later() -> None:
    async def tell() -> list[GroupSpec | None]:
        restarts = Restarts()
        first = asyncio.create_task(restarts.report("1-0", error(0)))
        await asyncio.sleep(0)
        assert not first.done()
        restarts.decide("1-0", NEXT)
        return [await first, await restarts.report("1-0", error(1))]

    assert asyncio.run(tell()) == [NEXT, NEXT]


def test_the_first_verdict_counts_and_that_of_another_group_is_none() -> None:
    async def tell() -> list[GroupSpec | None]:
        restarts = Restarts()
        restarts.decide("1-0", None)
        restarts.decide("1-0", NEXT)
        restarts.decide("2-0", NEXT)
        return [await restarts.report(group, error(0)) for group in ("1-0", "2-0")]

    assert asyncio.run(tell()) == [None, NEXT]


def test_who_asks_for_more_reports_waits_for_them() -> None:
    async def tell() -> None:
        restarts = Restarts()
        asked = asyncio.create_task(restarts.reports("1-0", 1))
        waiting = [asyncio.create_task(restarts.report("1-0", error(rank))) for rank in (1,)]
        await asyncio.sleep(0.01)
        assert [each.rank for each in await restarts.reports("1-0", 0)] == [1]
        assert not asked.done()
        waiting.append(asyncio.create_task(restarts.report("1-0", error(0))))
        assert [each.rank for each in await asyncio.wait_for(asked, 5)] == [1, 0]
        restarts.decide("1-0", None)
        assert await asyncio.gather(*waiting) == [None, None]

    asyncio.run(tell())


def test_who_has_left_waits_for_what_comes_next() -> None:
    async def tell() -> None:
        restarts = Restarts()
        waiting = [asyncio.create_task(restarts.report("1-0", LEFT)) for _ in range(2)]
        assert await restarts.reports("1-0", 1) == [LEFT, LEFT]
        restarts.decide("1-0", NEXT)
        assert await asyncio.gather(*waiting) == [NEXT, NEXT]
        last = asyncio.create_task(restarts.report("1-1", LEFT))
        restarts.decide("1-1", None)
        assert await last is None

    asyncio.run(tell())


def test_a_caller_that_goes_away_takes_the_verdict_from_nobody() -> None:
    async def tell() -> GroupSpec | None:
        restarts = Restarts()
        gone = asyncio.create_task(restarts.report("1-0", error(0)))
        stays = asyncio.create_task(restarts.report("1-0", error(1)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        restarts.decide("1-0", NEXT)
        return await stays

    assert asyncio.run(tell()) == NEXT
