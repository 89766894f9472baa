"""Devices of engines are asked for where they are granted, and taken back from whoever is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from serve_apps.controller import engine_keeper
from serve_apps.controller.app import App
from serve_apps.controller.calls import Calls
from serve_apps.controller.decision import Decision
from serve_apps.controller.engine_devices import EngineDevices
from serve_apps.controller.engine_keeper import MISSED_S, EngineKeeper
from serve_apps.controller.threads import Threads
from serve_apps.controller.view import ClusterView
from tests.serve_apps.controller.world import World

APP = "chat:1"


class Stage:
    """An app with replicas, and what is done about its engines."""

    def __init__(self) -> None:
        self.app = App(World(devices=4).serving(1, 2).record)
        self.view = ClusterView()
        self.view.replicas = frozenset("xyz")
        self.view.alive = dict.fromkeys("abch", True)
        self.calls = Calls(lambda: None)
        self.orders = 0
        self.keeper = EngineKeeper(self.view, self.calls, Threads(), self._order)
        self.reserved: list[tuple[str, str]] = []
        self.freed: list[str] = []

    def _order(self) -> None:
        self.orders += 1

    def hear(
        self,
        replica: str,
        state: str,
        node: str = "a",
        devices: str | None = None,
        at: float = 0,
        parked: dict[str, Any] | None = None,
    ) -> None:
        facts = {"state": state, "node": "h", "engine_node": node, "devices": devices, "failures": 0}
        facts |= {"parked": parked, "woken": False, "not_woken": "", "ready_at": "1"}
        facts |= {"started_at": replica, "context_length": 64, "revision": 1}
        self.app.hear(APP, replica, facts, at or time.monotonic())

    def has(self, name: str, replica: str, node: str | None = "a") -> None:
        self.view.devices.append(EngineDevices(name, APP, replica, node))

    def carry_out(self, size: int, *granted: str, coming: tuple[str, ...] = ()) -> None:
        (revision,) = self.app.record.revisions
        self.view.grants[revision.holder], self.view.coming[revision.holder] = granted, coming
        self.keeper.carry_out(self.app, Decision(self.app.record, {revision.number: size}))

    def held(self) -> list[str]:
        """The nodes of the app's engines, as the broker is told them."""
        said = self.app.replicas.said(APP, time.monotonic())
        return list(self.app.engines.devices(APP, said).values())

    def clear_up(self) -> None:
        self.keeper.clear_up([self.app])


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Stage], Coroutine[Any, Any, None]]], None]:
    def run(go: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            stage = Stage()
            devices = engine_keeper.engine_devices
            monkeypatch.setattr(devices, "reserve", lambda name, node, _: stage.reserved.append((name, node)))
            monkeypatch.setattr(devices, "free", stage.freed.append)
            await go(stage)

        asyncio.run(main())

    return run


async def over(stage: Stage) -> None:
    while stage.calls:
        stage.calls.take_ended()
        await asyncio.sleep(0.01)


Play = Callable[[Callable[[Stage], Coroutine[Any, Any, None]]], None]


def test_who_stands_by_is_told_once_its_devices_are_asked_for(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "standby")
        stage.carry_out(1, "b")
        await over(stage)
        ((name, node),) = stage.reserved
        assert node == "b"
        start = stage.app.engines.starts[APP, "x"]
        assert (start.node, start.devices) == ("b", name)
        assert stage.orders == 1
        stage.carry_out(1, "b")
        await over(stage)
        assert len(stage.reserved) == 1, "it is asked for already"
        stage.view.devices = [EngineDevices(name, APP, "x", None)]
        stage.clear_up()
        await over(stage)
        assert stage.freed == [], "it is to have them, and does not know yet"

    play(go)


def test_the_last_that_came_ends_when_fewer_are_wanted(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "ready", "a", "d-x")
        stage.hear("y", "ready", "b", "d-y")
        stage.view.nodes = {APP: ("a", "b")}
        stage.carry_out(1, "a", "b")
        assert stage.app.engines.ends == {(APP, "y"): None}
        assert stage.orders == 1

    play(go)


def test_an_engine_on_a_node_that_is_granted_no_more_is_replaced_on_one_that_is(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "ready", "a", "d-x")
        stage.hear("y", "ready", "b", "d-y")
        stage.hear("z", "standby")
        stage.view.nodes = {APP: ("a", "b")}
        stage.carry_out(2, "b", "c")
        await over(stage)
        ((name, node),) = stage.reserved
        assert node == "c"
        assert stage.app.engines.ends == {}, "it goes when the other is ready"
        stage.hear("z", "ready", "c", name)
        stage.view.nodes = {APP: ("a", "b", "c")}
        stage.carry_out(2, "b", "c")
        assert stage.app.engines.ends == {(APP, "x"): None}

    play(go)


def test_an_engine_gets_ready_for_devices_that_others_are_about_to_leave(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "ready", "a", "d-x")
        stage.hear("y", "standby")
        stage.view.nodes = {APP: ("a",)}
        for _ in range(2):
            stage.carry_out(1, "a", coming=("b",))
        await over(stage)
        assert stage.app.engines.early == {(APP, "y"): "b"}
        start = stage.app.engines.starts[APP, "y"]
        stage.hear("y", "starting", "b", start.devices)
        assert stage.held() == ["a"], "whoever has it has not left"
        stage.carry_out(1, "a", coming=("b",))
        assert stage.app.engines.ends == {}
        stage.clear_up()
        await over(stage)
        assert stage.reserved == [], "Ray would try what it cannot place a second later only"
        assert stage.app.engines.ends == {}

        stage.carry_out(2, "a", "b")
        assert stage.app.engines.early == {}
        assert stage.app.engines.ends == {}
        assert stage.held() == ["a", "b"]
        stage.carry_out(2, "a", "b")
        await over(stage)
        assert stage.reserved == [(start.devices, "b")]

    play(go)


def test_an_engine_that_got_ready_in_vain_ends(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "ready", "a", "d-x")
        stage.hear("y", "standby")
        stage.view.nodes = {APP: ("a",)}
        stage.carry_out(1, "a", coming=("b",))
        await over(stage)
        stage.hear("y", "starting", "b", stage.app.engines.starts[APP, "y"].devices)
        stage.carry_out(1, "a")
        assert stage.app.engines.ends == {(APP, "y"): None}
        assert stage.held() == ["a"], "it never had them"
        stage.carry_out(2, "a", "b")
        assert (APP, "y") in stage.app.engines.ends, "it is told already"
        stage.hear("y", "standby")
        assert (stage.app.engines.early, stage.app.engines.starts) == ({}, {})
        assert stage.reserved == []

    play(go)


def test_an_engine_that_starts_for_devices_which_nobody_asks_for_ends(play: Play) -> None:
    """The controller that was going to has died."""

    async def go(stage: Stage) -> None:
        stage.hear("x", "starting", "a", "asked for")
        stage.hear("y", "starting", "b", "not asked for")
        stage.has("asked for", "x", None)
        stage.clear_up()
        assert stage.app.engines.ends == {(APP, "y"): None}

    play(go)


def parked(node: str, since: str, gib: float = 1.0, revision: int = 1) -> dict[str, Any]:
    taken = {"bytes": int(gib * 2**30), "most_bytes": 2 * 2**30}
    return {"node": node, "since": since, "revision": revision, **taken}


def test_an_engine_that_is_not_wanted_for_a_while_is_parked(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "ready", "a", "d-x")
        stage.hear("y", "ready", "b", "d-y")
        stage.view.nodes = {APP: ("a", "b")}
        stage.carry_out(1, "a", "b")
        stage.app.engines.told(1)
        facts = stage.app.replicas.said(APP, time.monotonic())["y"]
        order = stage.app.engines.order(APP, "y", facts, lambda number: True)
        assert order == {"action": "end", "park": {"most_bytes": None}}

    play(go)


def test_an_engine_of_an_app_that_goes_or_changes_is_not_parked(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "ready", "a", "d-x")
        stage.view.nodes = {APP: ("a",)}
        stage.app.record = replace(stage.app.record, removed=True)
        stage.carry_out(0)
        assert (APP, "x") in stage.app.engines.ends
        assert stage.app.engines.parks == {}

    play(go)


@pytest.mark.parametrize("alive", [{"b": True}, {"a": False, "b": True}], ids=["it is dead", "it is going"])
def test_no_engine_is_parked_on_a_node_that_does_not_stay(play: Play, alive: dict[str, bool]) -> None:
    """Nobody would ever wake it, and its process would keep what it has there."""

    async def go(stage: Stage) -> None:
        stage.view.alive = alive
        stage.hear("x", "ready", "a", "d-x")
        stage.hear("y", "ready", "b", "d-y")
        stage.view.nodes = {APP: ("a", "b")}
        stage.carry_out(1, "b")
        assert stage.app.engines.ends == {(APP, "x"): None}
        assert stage.app.engines.parks == {}

    play(go)


@pytest.mark.parametrize("alive", [{"b": True}, {"a": False, "b": True}], ids=["it is dead", "it is going"])
def test_what_is_parked_goes_with_its_node(play: Play, alive: dict[str, bool]) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "standby", parked=parked("a", "1"))
        stage.hear("y", "standby", parked=parked("b", "1"))
        stage.clear_up()
        assert stage.app.engines.discards == set()
        stage.view.alive = alive
        stage.clear_up()
        assert stage.app.engines.discards == {(APP, "x")}

    play(go)


def test_an_engine_on_a_dead_node_ends_where_there_is_room_for_no_other(play: Play) -> None:
    """Its replica is elsewhere, so that it answers still; its device may be somebody else's soon."""

    async def go(stage: Stage) -> None:
        stage.hear("x", "ready", "a", "d-x")
        stage.hear("y", "standby")
        stage.view.nodes = {APP: ("a",)}
        stage.carry_out(1)
        assert stage.app.engines.ends == {}, "its node is there"
        del stage.view.alive["a"]
        stage.carry_out(1, "b")
        assert stage.app.engines.ends == {}, "another one starts"
        del stage.app.engines.starts[APP, "y"]
        stage.carry_out(1)
        assert stage.app.engines.ends == {(APP, "x"): None}
        assert stage.app.engines.parks == {}

    play(go)


def test_nothing_is_parked_where_nothing_may_be(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.keeper = EngineKeeper(stage.view, stage.calls, Threads(), stage._order, parked_bytes=0)
        stage.hear("x", "standby")
        stage.carry_out(1, "a")
        assert not stage.app.engines.starts[APP, "x"].parks
        await over(stage)
        stage.hear("x", "ready", "a", "d-x")
        stage.view.nodes = {APP: ("a",)}
        stage.carry_out(0)
        assert stage.app.engines.parks == {}

    play(go)


def test_an_engine_starts_where_it_is_parked(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "standby")
        stage.hear("y", "standby", parked=parked("b", "1"))
        stage.hear("z", "standby", parked=parked("a", "1"))
        stage.carry_out(2, "b", "c")
        await over(stage)
        starts = {replica: start.node for (_, replica), start in stage.app.engines.starts.items()}
        assert starts == {"y": "b", "x": "c"}, "and nobody loses one that is parked elsewhere"

    play(go)


def test_one_that_gets_ready_early_wakes_where_it_is_parked(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "standby")
        stage.hear("y", "standby", parked=parked("b", "1"))
        stage.carry_out(0, coming=("b",))
        assert stage.app.engines.early == {(APP, "y"): "b"}

    play(go)


def test_the_oldest_that_are_parked_go_where_a_node_has_too_many(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "standby", parked=parked("a", "2026-01-01T00:00:01"))
        stage.hear("y", "standby", parked=parked("a", "2026-01-01T00:00:03", 1.5))
        stage.hear("z", "standby", parked=parked("b", "2026-01-01T00:00:00", 1.5))
        stage.clear_up()
        assert stage.app.engines.discards == {(APP, "x")}
        said = stage.app.replicas.said(APP, time.monotonic())
        order = stage.app.engines.order(APP, "x", said["x"], lambda number: True)
        assert order == {"action": "discard"}
        stage.hear("x", "standby")
        assert stage.app.engines.discards == set()

    play(go)


def test_what_is_parked_goes_when_its_app_serves_something_else(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "standby", parked=parked("a", "1", revision=1))
        stage.hear("y", "standby", parked=parked("a", "1", revision=7))
        stage.clear_up()
        assert stage.app.engines.discards == {(APP, "y")}

    play(go)


def test_devices_of_those_who_are_gone_are_free(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.hear("x", "ready", "a", "kept")
        stage.hear("y", "standby")
        stage.has("kept", "x")
        stage.has("of one that is dead", "w")
        stage.has("of one that has given it back", "y")
        stage.has("on a lost node", "x", "lost")
        stage.has("of one that says that it ends", "z")
        stage.view.gone = {"lost"}
        stage.app.engines.gone.add((APP, "z"))
        stage.clear_up()
        await over(stage)
        assert sorted(stage.freed) == sorted(each.name for each in stage.view.devices if each.name != "kept")
        stage.keeper.clear_up([])
        await over(stage)
        assert "kept" in stage.freed, "nothing is kept for an app that there is not"

    play(go)


def test_who_is_silent_keeps_its_devices_until_its_node_is_lost_for_long(play: Play) -> None:
    async def go(stage: Stage) -> None:
        now = time.monotonic()
        stage.hear("x", "ready", "a", "d", at=now - MISSED_S + 5)
        stage.hear("y", "ready", "a", "e", at=now - MISSED_S - 1)
        stage.has("d", "x")
        stage.has("e", "y")
        stage.clear_up()
        await over(stage)
        assert stage.freed == [], "its node may be slow"
        stage.view.gone = {"h"}
        stage.clear_up()
        await over(stage)
        assert stage.freed == ["e"], "the engine of the other may not have missed it yet"

    play(go)


def test_nothing_is_taken_back_before_it_is_known_who_lives(play: Play) -> None:
    async def go(stage: Stage) -> None:
        stage.view.replicas = None
        stage.has("d", "x")
        stage.clear_up()
        await over(stage)
        assert stage.freed == []

    play(go)
