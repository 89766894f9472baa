"""Ranks learn where their group's store is, whoever comes first."""

from __future__ import annotations

import asyncio

from train_jobs.group.meetings import Meetings


def test_all_ranks_hear_the_address_whoever_comes_first() -> None:
    async def meet() -> list[str]:
        meetings = Meetings()
        early = asyncio.create_task(meetings.meet("1-0", None, 3))
        await asyncio.sleep(0)
        assert not early.done()
        first = await meetings.meet("1-0", "10.0.0.1:5", 3)
        return [await early, first, await meetings.meet("1-0", None, 3)]

    assert asyncio.run(meet()) == ["10.0.0.1:5"] * 3


def test_groups_do_not_hear_each_others_and_one_is_forgotten_when_all_have_heard() -> None:
    async def meet() -> None:
        meetings = Meetings()
        for name, address in (("1-0", "10.0.0.1:5"), ("2-0", "10.0.0.1:6")):
            other = asyncio.create_task(meetings.meet(name, None, 2))
            assert await meetings.meet(name, address, 2) == address
            assert await other == address
        late = asyncio.create_task(meetings.meet("1-0", None, 2))
        await asyncio.sleep(0.01)
        assert not late.done()
        late.cancel()

    asyncio.run(meet())


def test_a_rank_that_gives_up_takes_nothing_from_the_others() -> None:
    async def meet() -> str:
        meetings = Meetings()
        gives_up = asyncio.create_task(meetings.meet("1-0", None, 2))
        stays = asyncio.create_task(meetings.meet("1-0", None, 2))
        await asyncio.sleep(0)
        gives_up.cancel()
        await asyncio.sleep(0)
        await meetings.meet("1-0", "10.0.0.1:5", 2)
        return await stays

    assert asyncio.run(meet()) == "10.0.0.1:5"
