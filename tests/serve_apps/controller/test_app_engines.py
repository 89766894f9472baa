"""What replicas are told about their engines, and what is made of those that do not start."""

from __future__ import annotations

from typing import Any

from serve_apps.controller.app_engines import MOST_FAILURES, MOST_RETRY_S, AppEngines, EngineStart
from serve_apps.controller.engine_places import PlacedEngine, StandingBy

APP = "chat:1"


def facts(state: str, **more: Any) -> dict[str, Any]:
    return {"state": state, "node": "h", "failures": 0, "parked": None, "failure": "", "ready_at": "", **more}


def at(node: str, ready_at: str = "") -> dict[str, Any]:
    return {"engine_node": node, "ready_at": ready_at}


def nobody_knows(number: int) -> bool:
    return False


def test_a_replica_that_stands_by_is_told_to_start_until_it_does() -> None:
    engines = AppEngines({(APP, "x"): EngineStart("a", "devices")})
    standby, starting = facts("standby"), facts("starting", **at("a"))
    assert engines.placed(APP, {"x": standby}) == [PlacedEngine("x", "a", "starting")]
    assert engines.standing_by(APP, {"x": standby, "y": standby}) == [StandingBy("y", "h")]
    order = engines.order(APP, "x", standby, nobody_knows)
    assert order == {"action": "start", "node": "a", "devices": "devices", "early": False, "parks": False}
    assert engines.order(APP, "y", standby, nobody_knows) is None
    assert engines.order(APP, "x", starting, nobody_knows) is None
    engines.hear(APP, "x", facts("ready", **at("a", "1")), 0.0)
    assert not engines.starts


def test_a_replica_ends_its_engine_once_every_gateway_knows() -> None:
    engines = AppEngines(ends={(APP, "x"): None})
    ready = facts("ready", **at("a", "1"))
    said = {"x": ready, "y": facts("ready", **at("b", "0"))}
    assert engines.active(APP, said) == ["y"]
    assert engines.placed(APP, said) == [PlacedEngine("y", "b", "ready"), PlacedEngine("x", "a", "ending")]
    assert engines.order(APP, "x", ready, lambda number: True) is None, "gateways were not told yet"
    engines.told(7)
    assert engines.order(APP, "x", ready, nobody_knows) is None
    assert engines.order(APP, "x", ready, lambda number: number >= 7) == {"action": "end", "park": None}
    engines.told(8)
    assert engines.order(APP, "x", ready, lambda number: number <= 7) == {"action": "end", "park": None}
    engines.hear(APP, "x", facts("ending", **at("a", "1")), 0.0)
    assert engines.active(APP, {"x": facts("ending", **at("a", "1"))}) == []
    engines.hear(APP, "x", facts("standby"), 0.0)
    assert not engines.ends


def test_an_engine_that_starts_ends_at_once_where_it_is_not_wanted_any_more() -> None:
    engines = AppEngines({(APP, "x"): EngineStart("a", "devices"), (APP, "y"): EngineStart("b", "more")})
    for replica in ("x", "y"):
        engines.end(APP, replica)
    assert engines.order(APP, "x", facts("starting", **at("a")), nobody_knows) == {
        "action": "end",
        "park": None,
    }
    assert engines.order(APP, "y", facts("standby"), nobody_knows) is None, "it was not told of it"
    for replica in ("x", "y"):
        engines.hear(APP, replica, facts("standby"), 0.0)
    assert not engines.ends
    assert not engines.starts


def test_an_engine_that_starts_on_a_node_that_is_lost_is_not_waited_for() -> None:
    engines = AppEngines(lost={"b"})
    assert engines.order(APP, "x", facts("starting", **at("b")), nobody_knows) == {"action": "lose"}
    assert engines.order(APP, "x", facts("starting", **at("a")), nobody_knows) is None


def test_the_oldest_engine_has_the_first_devices_and_those_that_end_the_last() -> None:
    engines = AppEngines({(APP, "new"): EngineStart("d", "of new")}, ends={(APP, "x"): None})
    said = {
        "x": facts("ready", devices="of x", **at("a", "1")),
        "y": facts("ready", devices="of y", **at("c", "3")),
        "z": facts("ready", devices="of z", **at("b", "2")),
        "s": facts("starting", devices="of s", **at("e")),
        "e": facts("ending", devices="of e", **at("f", "0")),
        "new": facts("standby"),
    }
    ordered = [("of z", "b"), ("of y", "c"), ("of s", "e"), ("of new", "d"), ("of e", "f"), ("of x", "a")]
    assert list(engines.devices(APP, said).items()) == ordered


def test_an_engine_on_a_lost_node_gets_nothing_and_its_replica_ends() -> None:
    engines = AppEngines(lost={"b"})
    said = {"x": facts("ready", **at("a", "1")), "y": facts("ready", **at("b", "0")), "z": facts("standby")}
    assert engines.active(APP, said) == ["x"]
    assert engines.placed(APP, said) == [PlacedEngine("x", "a", "ready")]
    assert engines.order(APP, "y", said["y"], nobody_knows) == {"action": "lose"}
    assert engines.order(APP, "x", said["x"], nobody_knows) is None


def test_engines_that_do_not_start_are_tried_again_later_and_later() -> None:
    engines, now, waits = AppEngines(), 0.0, []
    for count in range(1, 10):
        engines.starts[APP, "x"] = EngineStart("a", "devices")
        engines.hear(APP, "x", facts("standby", failures=count, failure=f"no {count}"), now)
        engines.hear(APP, "x", facts("standby", failures=count, failure=f"no {count}"), now)
        assert not engines.starts
        assert engines.failure(APP) == (None if count < MOST_FAILURES else f"no {count}")
        began = now
        while not engines.may_start(APP, now):
            now += 0.5
        waits.append(now - began)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0] + [MOST_RETRY_S] * 4
    engines.hear(APP, "y", facts("ready", **at("a", "1")), now)
    assert engines.failure(APP) is None
    assert engines.may_start(APP, now)


def test_what_is_gone_is_forgotten() -> None:
    engines = AppEngines(
        {(APP, "x"): EngineStart("a", "d"), (APP, "y"): EngineStart("a", "d")}, {("old:1", "z"): 1}
    )
    engines.hear("old:1", "z", facts("standby", failures=1, failure="no"), 0.0)
    engines.ends["old:1", "z"] = 1
    engines.keep_only([APP], lambda name: ["x"])
    assert engines.starts.keys() == {(APP, "x")}
    assert not engines.ends
    assert engines.may_start("old:1", 0.0)
