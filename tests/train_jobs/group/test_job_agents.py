"""What starts and ends ranks' processes on a node: also when its fork server does not move any more."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket

import psutil
import pytest

from tests.processes import children_with
from train_jobs.elastic.heartbeats import Hearts
from train_jobs.group.job_agents import JobAgent
from train_jobs.rank.link import LinkAddress

GROUP, OTHER = "group-0", "group-1"


def fork_server() -> psutil.Process:
    """The one that this process has started last."""
    return max(children_with("cluster.node.fork_server"), key=lambda each: float(each.create_time()))


class Ends(Hearts):
    """Notes of which groups a process has ended before its time."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def ended(self, group: str) -> None:
        self.told.append(group)


@pytest.mark.slow
def test_a_fork_server_that_does_not_move_is_replaced_when_its_ranks_are_given_up() -> None:
    async def go() -> None:
        ends = Ends()
        agent = JobAgent(hearts=ends)
        await agent.start()
        stopped = fork_server()
        stopped.send_signal(signal.SIGSTOP)
        run = asyncio.create_task(agent.run_rank(GROUP, LinkAddress("\0nobody", b"key")))
        await agent.give_up(OTHER)  # it has nobody here
        assert not (await asyncio.wait([run], timeout=0.5))[0]
        await agent.give_up(GROUP)
        with pytest.raises(ConnectionError, match="fork server"):
            await asyncio.wait_for(run, 10)
        assert ends.told == [GROUP], "the other groups need not wait until it has been silent for long"
        await agent.start()
        anew = fork_server()
        assert anew.pid != stopped.pid
        end = await asyncio.wait_for(agent.run_rank(GROUP, LinkAddress("\0nobody", b"key")), 10)
        assert end.code == 1, "it found nobody to ask"
        anew.kill()
        anew.wait(10)

    asyncio.run(go())


@pytest.mark.slow
def test_a_rank_that_never_says_a_word_is_killed_and_the_fork_server_stays() -> None:
    async def go() -> None:
        address = f"\0silent-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(address)
            silent.listen()
            ends = Ends()
            agent = JobAgent(hearts=ends)
            await agent.start()
            server = fork_server()
            run = asyncio.create_task(agent.run_rank(GROUP, LinkAddress(address, b"key")))
            while not server.children():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # until the pid is known here
            await agent.give_up(GROUP)
            end = await asyncio.wait_for(run, 10)
            assert end.code == -signal.SIGKILL
            assert ends.told == [GROUP]
            assert server.is_running()
            server.kill()
            server.wait(10)

    asyncio.run(go())
