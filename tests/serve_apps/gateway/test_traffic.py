"""Requests wait while no version takes them, and a version that is drained has none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from serve_apps.controller.gateways import SILENT_S, Gateways
from serve_apps.gateway.app_table import AppTable, AppVersion
from serve_apps.gateway.traffic import Traffic
from serve_apps.spec import AppSpec
from tests.serve_apps.stub_gateway import CONFIG


def version(revision: int, *, replicas: int = 1, takes: bool = True) -> AppVersion:
    spec = AppSpec("chat", CONFIG, model_path="/nowhere", model_version=f"tiny@{revision}")
    return AppVersion(
        f"chat:{revision}", spec, 64, 1, replicas, ready=replicas > 0, revision=revision, takes=takes
    )


def table(*versions: AppVersion, number: int = 1) -> AppTable:
    return AppTable({"chat": versions}, number=number)


def test_of_two_versions_the_one_with_fewer_requests_a_replica_is_taken() -> None:
    async def go() -> list[int]:
        traffic = Traffic()
        traffic.take_over(table(version(1, replicas=1), version(2, replicas=3)))
        return [(await traffic.take("chat", 1)).revision for _ in range(8)]

    taken = asyncio.run(go())
    assert taken.count(1) == 2
    assert taken.count(2) == 6


def test_requests_wait_while_no_version_takes_any() -> None:
    async def go() -> None:
        traffic = Traffic()
        old, new = version(1, takes=False), version(2)
        traffic.take_over(table(old))
        waiting = [asyncio.create_task(traffic.take("chat", 2)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        assert traffic.report()["waiting"] == {"chat": 6}
        waiting.pop().cancel()
        await asyncio.sleep(0.01)
        assert traffic.report()["waiting"] == {"chat": 4}
        traffic.take_over(table(old, number=2))  # nothing that helps
        await asyncio.sleep(0.01)
        traffic.take_over(table(old, new, number=3))
        assert [(await task).revision for task in waiting] == [2, 2]
        report = traffic.report()
        assert (report["in_flight"], report["waiting"], report["seen"]) == ({"chat:2": 4}, {}, 3)
        for _ in waiting:
            traffic.leave(new, 2)
        assert traffic.report()["in_flight"] == {}

    asyncio.run(go())


def test_a_version_that_failed_a_request_is_avoided_where_there_is_another() -> None:
    async def go() -> None:
        traffic = Traffic()
        one, two = version(1), version(2)
        traffic.take_over(table(one, two))
        assert {(await traffic.take("chat", 1, avoid=[1])).revision for _ in range(4)} == {2}
        assert traffic.other("chat", one)
        traffic.take_over(table(one, replace(two, takes=False)))
        assert (await traffic.take("chat", 1, avoid=[1])).revision == 1
        assert not traffic.other("chat", one)

    asyncio.run(go())


def test_what_was_counted_is_reported_once() -> None:
    traffic = Traffic()
    traffic.answered(version(1))
    traffic.refused(version(1), failed=True)
    traffic.first_token("chat", 0.5)
    report = traffic.report()
    assert report["requests"] == {"chat:1 1": 2}
    assert report["errors"] == {"chat:1 1": 1}
    assert report["first_token_s"] == {"chat": [0.5]}
    traffic.answered(version(2))
    assert traffic.report() == report, "nobody may have heard it"
    traffic.told()
    assert (after := traffic.report())["requests"] == {"chat:2 2": 1}
    assert after["number"] != report["number"]
    assert not after["errors"]
    assert not after["first_token_s"]


def test_counts_that_are_told_twice_count_once() -> None:
    async def go() -> None:
        traffic, gateways = Traffic(), Gateways()
        traffic.take_over(table(version(1)))
        await traffic.take("chat", 3)
        traffic.answered(version(1))
        report = traffic.report()
        assert gateways.report("a", report, 0.0)
        assert not gateways.report("a", traffic.report(), 0.5), "the answer to the first one was lost"
        assert gateways.report("b", report, 0.5), "another gateway counts for itself"
        assert gateways.requests == {"chat:1 1": 2}
        assert [gateways.take_asked("chat") for _ in range(2)] == [6, 0]

    asyncio.run(go())


NOTHING: dict[str, dict[str, int]] = {"requests": {}, "errors": {}, "asked": {}}


def said(seen: int, **in_flight: int) -> dict[str, object]:
    counts = {name.replace("_", ":"): count for name, count in in_flight.items()}
    return {"seen": seen, "number": 1, "in_flight": counts, "waiting": {}, **NOTHING}


def test_a_version_is_drained_when_every_gateway_knows_and_has_nothing_left() -> None:
    gateways = Gateways()
    gateways.report("a", said(1, chat_1=2), 0.0)
    gateways.report("b", said(1), 0.0)
    gateways.route({"chat:1"}, set(), 1)
    assert gateways.taken("chat:1", 0.0)
    assert not gateways.drained("chat:1", 0.0)
    gateways.route({"chat:2"}, {"chat:1"}, 2)
    gateways.report("b", said(2, chat_2=1), 1.0)
    assert not gateways.drained("chat:1", 1.0)
    assert not gateways.taken("chat:2", 1.0)
    gateways.report("a", said(2, chat_1=1), 1.0)
    assert gateways.taken("chat:2", 1.0)
    assert not gateways.drained("chat:1", 1.0)
    gateways.report("a", said(2), 1.5)
    assert gateways.drained("chat:1", 1.5)
    # A later table does not change that; requests again do.
    gateways.route({"chat:2"}, {"chat:1"}, 3)
    assert gateways.drained("chat:1", 1.5)
    gateways.route({"chat:1", "chat:2"}, set(), 4)
    assert not gateways.drained("chat:1", 1.5)


def test_a_gateway_that_is_gone_is_not_waited_for() -> None:
    gateways = Gateways()
    gateways.report("a", said(1, chat_1=2), 0.0)
    gateways.route(set(), {"chat:1"}, 2)
    assert not gateways.drained("chat:1", SILENT_S)
    assert gateways.drained("chat:1", SILENT_S + 0.1)


@pytest.mark.parametrize(("least", "replicas", "capacity"), [(1, 0, 8), (1, 3, 16), (0, 0, 4)])
def test_the_queue_is_bounded_by_what_is_there(least: int, replicas: int, capacity: int) -> None:
    config = CONFIG.model_copy(update={"replicas": CONFIG.replicas.model_copy(update={"min": least})})
    one = version(1, replicas=replicas)
    one = replace(one, spec=replace(one.spec, config=config))
    assert table(one).capacity("chat") == capacity


def test_a_version_is_proven_by_an_answer_until_it_is_gone() -> None:
    traffic = Traffic()
    traffic.take_over(table(version(1), version(2)))
    for number in (1, 2):
        traffic.refused(version(number), failed=False)
    assert not traffic.proven(version(1))
    traffic.answered(version(1))
    traffic.take_over(table(version(1), number=2))
    assert [traffic.proven(version(number)) for number in (1, 2)] == [True, False]
    traffic.take_over(table(version(2), number=3))
    assert not traffic.proven(version(1))
