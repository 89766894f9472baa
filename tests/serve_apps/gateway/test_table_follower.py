"""A gateway follows its apps whatever the controller says, and hears of what is new at once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from serve_apps.gateway import table_follower
from serve_apps.gateway.replica_backend import ReplicaBackend
from serve_apps.gateway.table_follower import TableFollower
from tests.serve_apps.stub_gateway import StubGateway

ANSWER: dict[str, Any] = {
    "number": 1,
    "poll_s": 0.01,
    "serve": "s-1",
    "apps": {},
    "gateways": 1,
    "shares": {},
    "tells_of_apps": True,
}


class Controller:
    """Answers what is next in `answers`, and then the last again; has news while `news` is set."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.reports: list[dict[str, Any]] = []
        self.news = asyncio.Event()

    async def ask(self, method: str, *arguments: Any, timeout_s: float, once: bool = False) -> Any:
        if method == "table_news":
            await self.news.wait()
            self.news.clear()
            return True
        self.reports.append(arguments[1])
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Backend:
    async def connect(self, applications: Any, serve: str) -> None:
        pass


def follower_of(controller: Controller) -> TableFollower:
    gateway = StubGateway()
    follower = TableFollower("g", gateway.service, cast(ReplicaBackend, Backend()), None, {})
    follower._controller = controller  # type: ignore[assignment]
    return follower


async def reports(controller: Controller, number: int) -> None:
    async with asyncio.timeout(5.0):
        while len(controller.reports) < number:
            await asyncio.sleep(0.01)


def test_an_answer_that_it_cannot_read_ends_no_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_follower, "LOOK_AT_MOST_EVERY_S", 0.0)

    async def go() -> None:
        nonsense = {**ANSWER, "engines": {"chat": {"replica": {"ready_s": 1.0}}}}
        controller = Controller(nonsense, {"number": 1}, ANSWER)
        running = asyncio.create_task(follower_of(controller).run())
        await reports(controller, 4)
        assert not running.done()
        running.cancel()

    asyncio.run(go())


def test_it_looks_at_once_when_there_is_news_or_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_follower, "LOOK_AT_MOST_EVERY_S", 0.0)

    async def go() -> None:
        controller = Controller({**ANSWER, "poll_s": 600.0})
        follower = follower_of(controller)
        running = asyncio.create_task(follower.run())
        await reports(controller, 1)
        controller.news.set()
        await reports(controller, 2)
        waiting = asyncio.create_task(follower._service.traffic.take("chat", 1))
        await reports(controller, 3)
        assert controller.reports[-1]["waiting"] == {"chat": 1}
        for task in (running, waiting):
            task.cancel()

    asyncio.run(go())
