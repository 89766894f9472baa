"""Several gateways behind a front, of which any may die under load; and several without one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.clusters import LiveCluster, started
from tests.serve_apps import driver
from tests.serve_apps.drill_load import Seen, drill_load
from tests.serve_apps.drills import FAKE, THREE_WORKERS, Stage, staged, until
from tests.serve_apps.driver import Driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLS = 10
GATEWAYS = 3
CLIENTS = 24
"""Every second one streams."""
BACK_S = 60.0
BURST_S = 12.0
BODY = {"model": "chat", "prompt": [10], "max_tokens": 3}


def serving() -> dict[str, Any]:
    from serve_apps.controller.client import ControllerClient

    return ControllerClient().serving()


def set_gateways(stage: Stage) -> list[str]:
    """The URLs of the gateways, once they are all there."""
    until(lambda: len(stage.call(serving)["gateways"]) == GATEWAYS, BACK_S)
    return [each["url"] for each in stage.call(serving)["gateways"]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    section = f"gateway: {{count: {GATEWAYS}, front: haproxy}}"
    with started(tmp_path_factory.mktemp("front"), *THREE_WORKERS, section) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def stage(cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(cluster, FAKE, tmp_path_factory.mktemp("model"), tensor=1) as stage:
        set_gateways(stage)
        yield stage


def gateway_processes(stage: Stage) -> list[psutil.Process]:
    return stage.cluster.processes("ray::ServeReplica:gateway")


def test_ten_kills_of_a_gateway_cost_nothing_but_streams_that_it_had(stage: Stage) -> None:
    kills: list[float] = []
    with drill_load(stage.url, CLIENTS, max_tokens=FAKE.max_tokens) as load:
        until(lambda: len(load.seen) >= 2 * CLIENTS, BACK_S)
        for number in range(KILLS):
            victims = gateway_processes(stage)
            assert len(victims) == GATEWAYS
            victim = victims[number % GATEWAYS]
            kills.append(time.monotonic())
            victim.kill()
            # All of them are there again, and answer.
            until(lambda victim=victim: len(set(gateway_processes(stage)) - {victim}) == GATEWAYS, BACK_S)
            until(lambda: len(set_gateways(stage)) == GATEWAYS, BACK_S)
            before = len(load.seen)
            until(lambda before=before: len(load.seen) >= before + 2 * CLIENTS, BACK_S)
    failed = [seen for seen in load.seen if not seen.answered]
    # A stream whose answer had begun is cut off; it is seen at once.
    cut = [seen for seen in failed if seen.streamed and seen.text and near(seen, kills)]
    print(
        f"{len(load.seen)} requests, {len(cut)} streams cut off by {KILLS} kills, the longest answer took"
        f" {max(seen.ended - seen.began for seen in load.seen if seen.answered):.2f} s"
    )
    assert [seen for seen in failed if seen not in cut] == []
    assert not any(seen.refused for seen in load.seen)
    assert len(load.seen) > 20 * KILLS
    assert len({seen.text for seen in load.seen if seen.answered}) == 1


def near(seen: Seen, kills: list[float]) -> bool:
    """Whether a request ended within two seconds of a kill that it ran at."""
    return any(seen.began <= kill <= seen.ended <= kill + 2.0 for kill in kills)


def test_a_gateway_behind_a_front_is_asked_through_it_alone(stage: Stage) -> None:
    for url in set_gateways(stage):
        refused = httpx.post(f"{url}/v1/completions", json=BODY, timeout=30)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_through_the_front")
        forged = httpx.get(f"{url}/metrics", headers={"x-shoal-front": "guess"}, timeout=30)
        assert forged.status_code == 401, "figures are for whom the config names"
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    claimed = {"x-forwarded-for": "10.0.0.5", "x-shoal-front": "guess"}
    answer = httpx.post(f"{stage.url}/v1/completions", json=BODY, headers=claimed, timeout=30)
    assert answer.status_code == 200


def test_a_front_that_is_killed_comes_back(stage: Stage) -> None:
    front = stage.call(serving)["front"]
    psutil.Process(front["pid"]).kill()
    until(lambda: answers(stage.url), BACK_S)
    (actor,) = stage.cluster.processes("ray::Front")
    actor.kill()
    until(lambda: stage.call(serving)["front"]["pid"] not in (None, front["pid"]), BACK_S)
    until(lambda: answers(stage.url), BACK_S)
    assert not psutil.pid_exists(front["pid"])


def answers(url: str) -> bool:
    try:
        return httpx.post(f"{url}/v1/completions", json=BODY, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def test_gateways_without_a_front_are_each_reached_at_their_node(tmp_path: Path) -> None:
    """Together they let in as many requests as one would."""
    (tmp_path / "cluster").mkdir()
    with (
        started(tmp_path / "cluster", *THREE_WORKERS, "gateway: {count: all}") as cluster,
        Driver(cluster.record) as call,
    ):
        url = call(driver.start)
        call(driver.deploy, FAKE.spec(tmp_path / "model", 1))
        until(lambda: len(call(serving)["gateways"]) == 4, BACK_S)
        urls = [each["url"] for each in call(serving)["gateways"]]
        assert url in urls
        assert len({httpx.URL(each).host for each in urls}) == 4
        assert all(answers(each) for each in urls)
        # Two replicas of 8, and 100 that wait.
        let_in = burst(urls, 160)
        print(f"{let_in} of 160 requests are let in")
        assert 110 <= let_in <= 120


def burst(urls: list[str], number: int) -> int:
    """How many of so many requests at once are let in, most of them through one gateway."""
    # None of them ends before all have come.
    body = {**BODY, "max_tokens": 1900, "ignore_eos": True}

    async def ask(http: httpx.AsyncClient, place: int) -> bool:
        url = urls[0] if place % 2 else urls[place % len(urls)]
        return (await http.post(f"{url}/v1/completions", json=body)).status_code == 429

    async def go() -> int:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http:
            tasks = [asyncio.create_task(ask(http, place)) for place in range(number)]
            ended, running = await asyncio.wait(tasks, timeout=BURST_S)
            for task in running:
                task.cancel()
            return number - sum(task.result() for task in ended)

    return asyncio.run(go())
