"""The store of a job's groups is there as long as its owner, and another one when it ends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable

import psutil

from cluster.node.forked_processes import ForkedProcesses
from train_jobs.elastic.store_process import PRELOADED, keep_store
from train_jobs.parallel.rendezvous import reach_store

HOST = "127.0.0.1"
LIMIT_S = 60


def run(go: Callable[[asyncio.Queue[str | None]], Awaitable[None]]) -> None:
    """With a store that is kept meanwhile, and what is told of it."""

    async def main() -> None:
        told: asyncio.Queue[str | None] = asyncio.Queue()
        forks = ForkedProcesses(PRELOADED, title="store")
        keeping = asyncio.create_task(keep_store(lambda: forks, HOST, told.put_nowait))
        async with asyncio.timeout(LIMIT_S):
            await go(told)
            await forks.close()
            while processes():
                await asyncio.sleep(0.05)
        keeping.cancel()

    asyncio.run(main())


def processes() -> list[psutil.Process]:
    mine = psutil.Process(os.getpid()).children(recursive=True)
    return [each for each in mine if each.is_running() and "shoal::Store" in " ".join(each.cmdline())]


def test_who_has_it_forked_imports_no_torch() -> None:
    code = "import sys, train_jobs.elastic.lighthouse; sys.exit('torch' in sys.modules)"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0


def test_another_store_is_started_when_one_ends() -> None:
    async def go(told: asyncio.Queue[str | None]) -> None:
        first = await told.get()
        assert first is not None
        (await asyncio.to_thread(reach_store, first)).set("key", "value")
        again = await asyncio.to_thread(reach_store, first)
        assert await asyncio.to_thread(again.get, "key") == b"value"
        (process,) = processes()
        process.kill()
        assert await told.get() is None
        second = await told.get()
        assert second is not None
        other = await asyncio.to_thread(reach_store, second)
        assert not await asyncio.to_thread(other.check, ["key"])
        (another,) = processes()
        assert another.pid != process.pid

    run(go)
