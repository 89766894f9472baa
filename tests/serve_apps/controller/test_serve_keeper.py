"""Serve and the gateway are there again, whoever has ended them, and it is said why they were away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from serve_apps.controller import serve_keeper
from serve_apps.controller.calls import Calls
from serve_apps.controller.serve_keeper import ServeKeeper
from serve_apps.controller.serve_state import Served, ServeSeen
from serve_apps.controller.threads import Threads
from serve_apps.replica.serve_private import ServeInstance
from serve_apps.spec import GATEWAY, gateway_of

INFO = {"head_ip": "127.1.2.10", "serve_host": "127.1.2.2", "serve_port": 8000}
RUNNING = Served("running", 1, None)
DELETING = Served("deleting", 1, None)
NOON = 12 * 3600.0
"""Unix time."""


class Serve:
    """A Serve that can be shut down, and that a keeper starts again."""

    def __init__(self) -> None:
        self.count = 0
        self.instance: ServeInstance | None = None
        self.gateways: dict[str, Served] = {}
        self.applications: dict[str, Served] = {}
        self.calls = Calls(on_end=lambda: None)
        self.refuses = ""
        self.ends = False
        self.slow_s = 0.0
        self.keeper = ServeKeeper(
            INFO, self.calls, Threads(), self.start_gateway, self.start, self.end_gateway
        )

    def start(self, info: Mapping[str, Any]) -> None:
        assert info is INFO
        time.sleep(self.slow_s)
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.count += 1
        self.instance = ServeInstance(f"serve-{self.count}", info["serve_host"], info["serve_port"])

    @property
    def gateway(self) -> Served | None:
        """The head's."""
        return self.gateways.get(GATEWAY)

    @gateway.setter
    def gateway(self, gateway: Served) -> None:
        self.gateways[GATEWAY] = gateway

    def start_gateway(self, info: Mapping[str, Any], node: str | None) -> None:
        assert self.instance is not None
        if self.ends:
            raise RayServeException("there is no Serve")
        if node is not None and self.refuses:
            raise RuntimeError(self.refuses)
        self.gateways[GATEWAY if node is None else gateway_of(node)] = RUNNING

    def end_gateway(self, application: str) -> None:
        del self.gateways[application]

    def shut_down(self) -> None:
        self.instance, self.gateways, self.applications = None, {}, {}

    async def look(self, now: float = NOON, *others: str) -> list[tuple[str, dict[str, Any]]]:
        """One look of the keeper's, and the end of what it has begun."""
        seen = ServeSeen(self.instance, dict(self.applications), dict(self.gateways), ("healthy",))
        answers = {"chat:1": "chat:1" in self.applications}
        events = self.keeper.keep(seen, answers, now, others)
        while self.calls:
            await asyncio.sleep(0.01)
            self.calls.take_ended()
        return events

    async def up(self) -> None:
        """Have Serve, the gateway and an app there."""
        for _ in range(2):
            await self.look()
        self.applications = {"chat:1": RUNNING}
        await self.look()


def test_who_ends_the_cluster_finds_what_was_being_started_and_nothing_more_is() -> None:
    async def story() -> None:
        serve = Serve()
        serve.slow_s = 0.3
        serve.keeper.keep(ServeSeen(None, {}, {}, ()), {}, NOON, ())
        await asyncio.sleep(0.05)
        assert serve.instance is None
        await serve.keeper.leave()
        assert serve.instance is not None, "it is there for whoever ends it"
        await serve.look()
        assert serve.gateway is None
        serve.shut_down()
        await serve.look()
        assert serve.instance is None
        serve.keeper.try_again()
        await serve.up()
        assert (serve.count, serve.gateway) == (2, RUNNING)

    asyncio.run(story())


def test_a_first_start_is_no_end_of_anything() -> None:
    async def go() -> None:
        serve = Serve()
        first = serve.keeper.keep(ServeSeen(), {}, NOON)
        assert first == []
        await asyncio.sleep(0.1)
        assert serve.count == 1
        assert serve.keeper.note == ""

    asyncio.run(go())


def test_it_is_started_again_with_the_gateway_and_tells_when_it_was_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_keeper, "RETRY_S", 0.0)

    async def go() -> None:
        serve = Serve()
        await serve.up()
        before = serve.keeper.id
        # Somebody ends it.
        serve.gateway = DELETING
        assert await serve.look(NOON + 1) == []
        assert serve.keeper.note.startswith("Serve is being shut down by somebody else since 12:00:01 UTC")
        assert not serve.keeper.takes
        serve.shut_down()
        (ended,) = await serve.look(NOON + 4)
        assert ended[0] == "serve_ended"
        assert "shut down by somebody else at 12:00:01 UTC" in ended[1]["reason"]
        assert await serve.look(NOON + 5) == []
        assert serve.keeper.takes
        assert serve.keeper.id not in ("", before)
        assert await serve.look(NOON + 6) == []
        assert serve.gateway is RUNNING
        assert serve.keeper.note, "the app does not answer yet"
        serve.applications = {"chat:1": RUNNING}
        assert await serve.look(NOON + 9) == [("serve_back", {"seconds": 8.0})]
        assert serve.keeper.note == ""

    asyncio.run(go())


def test_another_serve_that_somebody_has_started_meanwhile_is_kept() -> None:
    async def go() -> None:
        serve = Serve()
        await serve.up()
        serve.shut_down()
        serve.instance = ServeInstance("theirs", "0.0.0.0", 8000)
        (ended,) = await serve.look()
        assert ended[0] == "serve_ended"
        assert serve.keeper.id == "theirs"
        assert serve.count == 1
        assert serve.gateway is RUNNING
        seen = ServeSeen(serve.instance, {}, dict(serve.gateways), ("healthy",))
        assert serve.keeper.describe(seen, "")["url"] == "http://127.1.2.10:8000"

    asyncio.run(go())


def test_a_stranger_who_takes_an_application_of_his_away_shuts_nothing_down() -> None:
    async def go() -> None:
        serve = Serve()
        await serve.up()
        serve.applications["default"] = DELETING
        assert await serve.look() == []
        assert serve.keeper.takes

    asyncio.run(go())


def test_what_cannot_be_started_says_why_and_is_tried_now_and_then_and_whenever_somebody_asks() -> None:
    async def go() -> None:
        serve = Serve()
        serve.refuses = "no room"
        await serve.look()
        assert serve.keeper.failure == "serve could not be started: no room"
        serve.refuses = ""
        await serve.look()
        assert serve.count == 0
        serve.keeper.try_again()
        assert serve.keeper.failure == ""
        await serve.look()
        assert serve.count == 1

    asyncio.run(go())


def test_a_gateway_that_meets_the_end_of_serve_has_not_failed() -> None:
    async def go() -> None:
        serve = Serve()
        await serve.look()
        serve.ends = True
        await serve.look()
        assert serve.gateway is None
        assert serve.keeper.failure == ""

    asyncio.run(go())


def test_a_gateway_that_failed_is_told_of_until_it_is_tried_again() -> None:
    async def go() -> None:
        serve = Serve()
        await serve.up()
        serve.gateway = Served("deploy_failed", 0, "the port is taken")
        await serve.look()
        assert serve.keeper.failure == "the port is taken"
        # Whoever asks now is not told of the last try.
        serve.keeper.try_again()
        await serve.look()
        assert serve.keeper.failure == ""
        assert serve.gateway is RUNNING

    asyncio.run(go())


def test_a_controller_that_comes_back_to_no_serve_says_so() -> None:
    async def go() -> None:
        serve = Serve()
        (ended,) = serve.keeper.keep(ServeSeen(), {"chat:1": False}, NOON)
        assert ended[0] == "serve_ended"
        await asyncio.sleep(0.1)
        assert serve.count == 1

    asyncio.run(go())


def test_a_serve_that_does_not_answer_is_told_of() -> None:
    serve = Serve()
    row = serve.keeper.describe(ServeSeen(), "nothing for 3 s")
    assert (row["status"], row["note"]) == ("silent", "Serve does not answer (nothing for 3 s)")


def test_gateways_come_and_go_with_the_nodes_that_are_to_have_one() -> None:
    async def go() -> None:
        serve = Serve()
        await serve.up()
        await serve.look(NOON, "n1", "n2")
        assert serve.gateways.keys() == {GATEWAY, "gateway:n1", "gateway:n2"}
        await serve.look(NOON, "n2")
        assert serve.gateways.keys() == {GATEWAY, "gateway:n2"}

    asyncio.run(go())


def test_a_node_whose_gateway_cannot_be_started_keeps_nobody_from_serving() -> None:
    async def go() -> None:
        serve = Serve()
        await serve.up()
        serve.refuses = "no room"
        await serve.look(NOON, "n1")
        seen = ServeSeen(serve.instance, {}, dict(serve.gateways), ("healthy",))
        described = serve.keeper.describe(seen, "")
        assert described["gateway_failures"] == {"gateway:n1": "gateway:n1 could not be started: no room"}
        assert described["failure"] is None
        serve.refuses = ""
        serve.keeper.try_again()
        await serve.look(NOON, "n1")
        assert "gateway:n1" in serve.gateways
        assert serve.keeper.describe(seen, "")["gateway_failures"] == {}

    asyncio.run(go())
