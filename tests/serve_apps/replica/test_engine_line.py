"""The line between a replica and its engine: calls both ways, cancelled, broken off, and of any size."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve_apps.engine.protocol import EngineError, WeightsError
from serve_apps.replica.engine_line import CallEndedError, EngineLine, LineLostError


class StrangeError(Exception):
    """Takes other arguments than it keeps: it does not come out of a pickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


StrangeError.__module__ = "somebody.elses"


class Answers:
    """One end's methods."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.cancelled = asyncio.Event()
        self.running = asyncio.Event()

    async def ended_here(self) -> None:
        """As what a gateway waits for that is gone."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.Event().wait()

    def what_does_not_travel(self) -> Any:
        return lambda: None

    def note(self, *what: Any) -> None:
        self.heard.append(what)

    def echo(self, value: Any) -> Any:
        return value

    async def later(self, value: Any) -> Any:
        await asyncio.sleep(0.01)
        return value

    async def never(self) -> None:
        self.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def fail(self, error: type[Exception], *arguments: Any) -> None:
        raise error(*arguments)

    def fail_strangely(self) -> None:
        raise StrangeError("a", "b")


@asynccontextmanager
async def two_ends() -> AsyncIterator[tuple[EngineLine, EngineLine, Answers]]:
    ours, theirs = socket.socketpair()
    answers = Answers()
    here = EngineLine(*await asyncio.open_unix_connection(sock=ours), Answers())
    there = EngineLine(*await asyncio.open_unix_connection(sock=theirs), answers)
    tasks = [asyncio.create_task(each.run()) for each in (here, there)]
    try:
        yield here, there, answers
    finally:
        here.close()
        there.close()
        await asyncio.gather(*tasks)


def run(go: Callable[[EngineLine, EngineLine, Answers], Awaitable[None]]) -> None:
    async def main() -> None:
        async with two_ends() as ends:
            await asyncio.wait_for(go(*ends), 20)

    asyncio.run(main())


def test_values_travel_as_they_are_whatever_their_size() -> None:
    async def go(here: EngineLine, there: EngineLine, answers: Answers) -> None:
        large = {"prompt": list(range(300_000)), "bias": ((1, 2.5),), "none": None, "text": "\ud800 é"}
        assert await here.call("echo", large) == large
        assert await there.call("echo", (1, 2)) == (1, 2), "both ends call"
        found = await asyncio.gather(*(here.call("later", number) for number in range(200)))
        assert found == list(range(200))
        here.tell("note", 1, "two")
        await here.call("echo", None)
        assert answers.heard == [(1, "two")]

    run(go)


def test_a_call_that_is_cancelled_ends_at_the_other_end() -> None:
    async def go(here: EngineLine, there: EngineLine, answers: Answers) -> None:
        call = asyncio.create_task(here.call("never"))
        await answers.running.wait()
        call.cancel()
        await answers.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await here.call("echo", 1) == 1, "the others go on"

    run(go)


def test_a_call_that_the_other_end_gives_up_ends_here_too() -> None:
    async def go(here: EngineLine, there: EngineLine, answers: Answers) -> None:
        with pytest.raises(CallEndedError):
            await here.call("ended_here")
        with pytest.raises(AttributeError, match="pickle"):
            await here.call("what_does_not_travel")
        with pytest.raises(AttributeError, match="pickle"):
            await here.call("echo", lambda: None)
        assert await here.call("echo", 1) == 1, "the others go on"
        assert not here._asked

    run(go)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [(EngineError, ("broken",)), (WeightsError, ("no",)), (OSError, (28, "full")), (ValueError, ("x",))],
)
def test_exceptions_come_as_they_are(error: type[Exception], arguments: tuple[Any, ...]) -> None:
    async def go(here: EngineLine, there: EngineLine, answers: Answers) -> None:
        with pytest.raises(error) as raised:
            await here.call("fail", error, *arguments)
        assert raised.value.args == arguments

    run(go)


def test_an_exception_that_does_not_travel_is_told_whole() -> None:
    async def go(here: EngineLine, there: EngineLine, answers: Answers) -> None:
        with pytest.raises(EngineError, match=r"(?s)Traceback.*StrangeError: ab"):
            await here.call("fail_strangely")
        with pytest.raises(AttributeError, match="no_such_method"):
            await here.call("no_such_method")

    run(go)


def test_when_the_other_end_goes_every_call_ends() -> None:
    async def go(here: EngineLine, there: EngineLine, answers: Answers) -> None:
        calls = [asyncio.create_task(here.call("never")) for _ in range(3)]
        await answers.running.wait()
        there.close()
        for call in calls:
            with pytest.raises(LineLostError):
                await call
        with pytest.raises(LineLostError):
            await here.call("echo", 1)
        here.tell("note", "nobody hears it")

    run(go)
