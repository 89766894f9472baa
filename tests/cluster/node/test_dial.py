"""A process that is forked elsewhere calls whoever has ordered it, and nobody else gets through."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from cluster.errors import ShoalError
from cluster.node import dial as dialing
from cluster.node.dial import DialAddress, Streams, Switchboard, dial
from cluster.node.forked_processes import CalledProcesses
from cluster.node.node_agent import NodeAgent
from cluster.node.output import show_output
from cluster.node.sessions import has_ended
from tests.cluster.node.test_node_fork_server import FORKED, kept, told, until

HOST = "127.0.0.1"
Calls = asyncio.Queue[tuple[str, Streams]]


@asynccontextmanager
async def switchboard() -> AsyncIterator[tuple[DialAddress, Calls]]:
    calls: Calls = asyncio.Queue()
    board = Switchboard(lambda purpose, streams: calls.put_nowait((purpose, streams)))
    try:
        yield await board.open(HOST), calls
    finally:
        board.close()


def run(go: Callable[[DialAddress, Calls], Awaitable[None]]) -> None:
    async def main() -> None:
        async with switchboard() as (address, calls):
            await asyncio.wait_for(go(address, calls), 60)

    asyncio.run(main())


def test_a_call_comes_with_what_it_is_for() -> None:
    async def go(address: DialAddress, calls: Calls) -> None:
        connection = await asyncio.to_thread(dial, address, "forks")
        purpose, (reader, writer) = await calls.get()
        assert purpose == "forks"
        connection.sendall(b"there\n")
        assert await reader.readline() == b"there\n"
        writer.write(b"back\n")
        assert await asyncio.to_thread(connection.recv, 16) == b"back\n"
        connection.close()
        assert await reader.read() == b""

    run(go)


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"x" * 80])
def test_who_has_not_the_key_does_not_get_through(says: bytes) -> None:
    async def go(address: DialAddress, calls: Calls) -> None:
        other = dataclasses.replace(address, key=secrets.token_bytes(32).hex())
        with pytest.raises(OSError, match=r"gone|reset|without the key"):
            await asyncio.to_thread(dial, other, "forks")
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.settimeout(20)
            assert len(await asyncio.to_thread(stranger.recv, 32)) == 32
            stranger.sendall(says)
            stranger.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert await asyncio.to_thread(stranger.recv, 32) == b""
        assert calls.empty()

    run(go)


def test_nobody_is_called_who_has_not_the_key() -> None:
    with socket.create_server((HOST, 0)) as impostor:

        async def go() -> None:
            def answer() -> None:
                caller, _ = impostor.accept()
                caller.sendall(bytes(32))
                received = b""
                while len(received) < 80:
                    received += caller.recv(80)
                caller.sendall(bytes(32))

            answering = asyncio.create_task(asyncio.to_thread(answer))
            address = DialAddress(HOST, impostor.getsockname()[1], secrets.token_bytes(32).hex())
            with pytest.raises(ConnectionError, match="without the key"):
                await asyncio.to_thread(dial, address, "forks")
            await answering

        asyncio.run(go())


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "ANSWER_S", 0.2)

    async def go(address: DialAddress, calls: Calls) -> None:
        with socket.create_connection((address.host, address.port)) as silent:
            silent.settimeout(10)
            await asyncio.to_thread(silent.recv, 32)
            assert await asyncio.to_thread(silent.recv, 32) == b""

    run(go)


async def called(agent: NodeAgent, address: DialAddress, calls: Calls) -> tuple[CalledProcesses, Streams]:
    """Processes on the agent's node, and what they print."""
    await asyncio.to_thread(agent.fork_for, address)
    found = dict([await calls.get(), await calls.get()])
    return CalledProcesses(found["forks"]), found["output"]


def test_processes_of_another_node_are_had_and_ended_like_ones_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with kept() as (agent, _):

        async def go(address: DialAddress, calls: Calls) -> None:
            forks, output = await called(agent, address, calls)
            shown = asyncio.create_task(show_output(output))
            end = await forks.run("one", f"{FORKED}:tell", {"path": str(tmp_path / "told")})
            assert end.code == 0
            stays = asyncio.create_task(forks.run("one", f"{FORKED}:stay", {"path": str(tmp_path / "stays")}))
            found = await asyncio.to_thread(until, lambda: told(tmp_path / "stays"))
            assert forks.pids("one") == [found["pid"]]
            await forks.end("one")
            assert (await stays).code == -signal.SIGKILL
            again = asyncio.create_task(forks.run("one", f"{FORKED}:stay", {"path": str(tmp_path / "again")}))
            found = await asyncio.to_thread(until, lambda: told(tmp_path / "again"))
            await forks.close()  # as when the owner dies: its end of the connection closes
            await asyncio.to_thread(until, lambda: has_ended(found["pid"]) and has_ended(found["parent"]))
            with pytest.raises(ConnectionError):
                await again
            await shown
            assert capfd.readouterr().out == "told\n" * 3

        run(go)


def test_the_last_words_come_and_where_nobody_hears_them_they_hold_nothing_up(tmp_path: Path) -> None:
    with kept() as (agent, _):

        async def go(address: DialAddress, calls: Calls) -> None:
            forks, (reader, writer) = await called(agent, address, calls)
            end = await forks.run("one", f"{FORKED}:say_and_die", {"lines": 5000})
            assert end.code == -signal.SIGABRT
            await forks.close()
            said = await reader.read()
            assert said.count(b"last words") == 5000
            assert b"Fatal Python error: Aborted" in said
            forks, (reader, writer) = await called(agent, address, calls)
            writer.close()
            end = await forks.run("one", f"{FORKED}:say_and_die", {"lines": 50_000})
            assert end.code == -signal.SIGABRT
            await forks.close()

        run(go)


def test_that_nobody_can_be_called_is_said() -> None:
    with kept() as (agent, _), socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        taken.close()
        with pytest.raises(ShoalError, match=rf"127\.0\.0\.1:{port} cannot be called"):
            agent.fork_for(DialAddress(HOST, port, "00"))
