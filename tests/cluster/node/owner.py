"""An owner of processes, in a process of its own: `python owner.py ADDRESS PATH` has one that stays."""

from __future__ import annotations

import asyncio
import sys

from cluster.node.forked_processes import ForkedProcesses


async def own(address: str, path: str) -> None:
    forks = ForkedProcesses([], address)
    await forks.run("owner", "tests.cluster.node.forked:stay", {"path": path})


if __name__ == "__main__":
    asyncio.run(own("\0" + sys.argv[1], sys.argv[2]))
