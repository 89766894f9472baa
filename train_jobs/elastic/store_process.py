"""The store by which the groups of a job find one another, in a process of its own: it needs torch."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable

from cluster.node.forked_processes import ForkedProcesses, ProcessEnd
from cluster.node.surroundings import is_own

PRELOADED = ("train_jobs.parallel.rendezvous",)
_OWNER = "store"
_AGAIN_S = 1.0
"""Between two stores: one that cannot be opened ends at once."""


async def keep_store(
    make: Callable[[], ForkedProcesses], host: str, tell: Callable[[str | None], None]
) -> None:
    """Have a store there for as long as this runs, at this address of the node; another one where it ends.

    Args:
        make: makes the owner of its process, with which the process ends at the latest.
        tell: told the address (host:port) of each, and None when it has ended.
    """
    forks = make()
    while True:
        said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        said.add_done_callback(lambda address: None if address.cancelled() else tell(address.result()))
        try:
            how = str(await _run(forks, host, said))
        except ConnectionError as error:
            how = str(error)
        said.cancel()
        tell(None)
        print(f"the process of the groups' store ended ({how}); another one is started", flush=True)
        await asyncio.sleep(_AGAIN_S)


async def _run(forks: ForkedProcesses, host: str, said: asyncio.Future[str]) -> ProcessEnd:
    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_own(writer.get_extra_info("socket")) and (line := await reader.readline()) and not said.done():
            said.set_result(line.decode().strip())
        writer.close()

    answers = f"\0shoal-store-{secrets.token_hex(16)}"
    async with await asyncio.start_unix_server(hear, answers):
        arguments = {"host": host, "answers": answers}
        return await forks.run(_OWNER, f"{__name__}:run_store_process", arguments, "shoal::Store")


def run_store_process(host: str, answers: str) -> None:
    """Open a store, tell its address to who listens, and keep it until this process is ended."""
    from train_jobs.parallel.rendezvous import open_store  # those who have it forked need no torch

    _store, address = open_store(host)
    with socket.socket(socket.AF_UNIX) as owner:
        owner.connect(answers)
        owner.sendall(f"{address}\n".encode())
    while True:
        signal.pause()
