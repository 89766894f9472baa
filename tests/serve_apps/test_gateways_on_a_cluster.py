"""Several gateways behind a front, of which any may die under load; and several without one."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from cluster.config.reading.api_keys import digest_of
from cluster.hosts.processes import NODE_NAME
from tests.clusters import LiveCluster, started
from tests.serve_apps import driver
from tests.serve_apps.drill_load import COMPLETIONS, Seen, drill_load
from tests.serve_apps.drills import FAKE, THREE_WORKERS, Stage, drain_node, staged, until
from tests.serve_apps.driver import Driver
from tests.serve_apps.event_lines import DONE, data_of

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
    section = f"gateway: {{count: {GATEWAYS}, metrics_from: [127.0.0.0/8]}}"
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
        # Nothing that a dead gateway had holds a place.
        until(lambda: len(stage.running()) == 2 * FAKE.batch, BACK_S)
    failed = [seen for seen in load.seen if not seen.answered]
    # A stream whose answer had begun is cut off; it is seen at once.
    cut = [seen for seen in failed if seen.begun and near(seen, kills)]
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
        forged = httpx.get(f"{url}/v1/models", headers={"x-shoal-front": "guess"}, timeout=30)
        assert forged.status_code == 403
        assert "shoal_gateway_requests" in httpx.get(f"{url}/metrics", timeout=30).text
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    claimed = {"x-forwarded-for": "10.0.0.5", "x-shoal-front": "guess"}
    answer = httpx.post(f"{stage.url}/v1/completions", json=BODY, headers=claimed, timeout=30)
    assert answer.status_code == 200


def test_figures_of_apps_are_told_by_one_gateway(stage: Stage) -> None:
    pages = [httpx.get(f"{url}/metrics", timeout=30).text for url in set_gateways(stage)]
    assert sum("shoal_app_replicas{" in page for page in pages) == 1
    assert sum("shoal_engine_steps_total{" in page for page in pages) == 1


LONG = {**BODY, "max_tokens": 500, "ignore_eos": True, "temperature": 0}
"""Takes five seconds."""


def test_a_request_whose_gateway_dies_is_answered_by_another_and_generated_once(stage: Stage) -> None:
    """The front sends it again, with nothing asked of the client."""
    request_id, answers_ = "once.1", list[httpx.Response]()

    def ask() -> None:
        headers = {"x-request-id": request_id}
        answers_.append(httpx.post(f"{stage.url}{COMPLETIONS}", json=LONG, headers=headers, timeout=60))

    began = time.monotonic()
    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: stage.generations(request_id) == 1, 10.0)
    time.sleep(2.0)
    kill_busy(stage)
    thread.join()
    print(f"answered {time.monotonic() - began:.1f} s after it was asked")
    (answer,) = answers_
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 500
    assert answer.json()["choices"][0]["text"] == plain(stage)
    assert stage.generations(request_id) == 1


def test_a_client_that_sends_its_key_again_gets_the_stream_from_its_beginning(stage: Stage) -> None:
    headers = {"idempotency-key": "mine", "x-request-id": "once.2"}
    body = {**LONG, "stream": True}
    with httpx.stream("POST", f"{stage.url}{COMPLETIONS}", json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()
        first = [next(lines) for _ in range(20)]
        kill_busy(stage)
        with pytest.raises(httpx.TransportError):
            list(lines)
    assert any("text" in line for line in first)
    reused = httpx.post(f"{stage.url}{COMPLETIONS}", json=BODY, headers=headers, timeout=60)
    assert (reused.status_code, reused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    again = httpx.post(f"{stage.url}{COMPLETIONS}", json=body, headers=headers, timeout=60)
    events = [json.loads(data) for data in map(data_of, again.text.splitlines()) if data not in (None, DONE)]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == plain(stage)
    assert stage.generations("once.2") == 1


def kill_busy(stage: Stage) -> None:
    """Kill the gateway that has a request, once all are there."""
    urls = set_gateways(stage)
    busy = [url for url in urls if httpx.get(f"{url}/load", timeout=30).json()["server_load"]]
    (url,) = busy
    (victim,) = [each for each in gateway_processes(stage) if httpx.URL(url).port in ports_of(each)]
    victim.kill()


def ports_of(process: psutil.Process) -> set[int]:
    return {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def plain(stage: Stage) -> str:
    """What a request is answered at which nothing happens."""
    answer = httpx.post(f"{stage.url}{COMPLETIONS}", json=LONG, timeout=60)
    return str(answer.json()["choices"][0]["text"])


def test_a_front_that_is_killed_comes_back(stage: Stage) -> None:
    front = stage.call(serving)["front"]
    psutil.Process(front["pid"]).kill()
    until(lambda: answers(stage.url), BACK_S)
    (actor,) = stage.cluster.processes("ray::Front")
    actor.kill()
    until(lambda: stage.call(serving)["front"]["pid"] not in (None, front["pid"]), BACK_S)
    until(lambda: answers(stage.url), BACK_S)
    assert not psutil.pid_exists(front["pid"])


def test_a_node_that_is_drained_costs_nothing_and_another_gets_its_gateway(stage: Stage) -> None:
    """But streams whose replica was there, which say so."""
    before = set(set_gateways(stage))
    nodes = {each.environ()[NODE_NAME]: each for each in gateway_processes(stage)}
    name = next(name for name in sorted(nodes) if name != "head")
    with drill_load(stage.url, CLIENTS, max_tokens=FAKE.max_tokens) as load:
        until(lambda: len(load.seen) >= 2 * CLIENTS, BACK_S)
        drain_node(stage.cluster, name)
        until(lambda: not nodes[name].is_running(), BACK_S)
        until(lambda: len(before - set(set_gateways(stage))) == 1, BACK_S)
        count = len(load.seen)
        until(lambda: len(load.seen) >= count + 2 * CLIENTS, BACK_S)
    assert name not in {each.environ()[NODE_NAME] for each in gateway_processes(stage)}
    failed = [seen for seen in load.seen if not seen.answered]
    lost = [seen for seen in failed if seen.ended_by_event]
    print(f"{len(load.seen)} requests, {len(lost)} streams whose replica was on the node")
    assert [seen for seen in failed if seen not in lost] == []


def answers(url: str, key: str = "") -> bool:
    try:
        return httpx.post(f"{url}{COMPLETIONS}", json=BODY, headers=bearer(key), timeout=9).status_code == 200
    except httpx.TransportError:
        return False


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Of the gateways of four nodes, without a front, where some tenants have limits."""
    directory = tmp_path_factory.mktemp("apart")
    limits = {"free": {}, "requests": {"requests_per_minute": 200}, "tokens": {"tokens_per_minute": 1000}}
    entries = [{"sha256": digest_of(name), "tenant": name, **limit} for name, limit in limits.items()]
    (directory / "keys.json").write_text(json.dumps(entries))
    section = "gateway: {count: all, front: none, keys: keys.json}"
    with started(directory, *THREE_WORKERS, section) as cluster, Driver(cluster.record) as call:
        url = call(driver.start)
        call(driver.deploy, FAKE.spec(directory / "model", 1))
        until(lambda: len(call(serving)["gateways"]) == 4, BACK_S)
        urls = [each["url"] for each in call(serving)["gateways"]]
        assert url in urls
        assert len({httpx.URL(each).host for each in urls}) == 4
        until(lambda: all(answers(each, "free") for each in urls), BACK_S)
        yield urls


def test_gateways_without_a_front_let_in_together_what_one_would(urls: list[str]) -> None:
    assert not answers(urls[0])
    # Two replicas of 8, and 100 that wait.
    let_in = burst(urls, 160)
    print(f"{let_in} of 160 requests are let in")
    assert 100 <= let_in <= 116


def burst(urls: list[str], number: int) -> int:
    """How many of so many requests at once are let in, most of them through one gateway."""
    # None of them ends before all have come.
    body = {**BODY, "max_tokens": 1900, "ignore_eos": True}

    async def ask(http: httpx.AsyncClient, place: int) -> bool:
        url = urls[0] if place % 2 else urls[place % len(urls)]
        return (await http.post(f"{url}{COMPLETIONS}", json=body)).status_code == 429

    async def go() -> int:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits, headers=bearer("free")) as http:
            tasks = [asyncio.create_task(ask(http, place)) for place in range(number)]
            ended, running = await asyncio.wait(tasks, timeout=BURST_S)
            for task in running:
                task.cancel()
            return number - sum(task.result() for task in ended)

    return asyncio.run(go())


def test_limits_of_tenants_hold_over_all_gateways(urls: list[str]) -> None:
    # Of the minute before, what was counted is spread evenly: none may begin meanwhile.
    until(lambda: time.monotonic() % 60 < 40, 25)
    let_in, _, seconds = offer(urls, "requests", 15.0)
    print(f"{let_in} of 200 requests a minute in {seconds:.1f} s")
    assert let_in == pytest.approx(200, rel=0.1)
    _, tokens, seconds = offer(urls, "tokens", 20.0)
    due = 1000 * (1 + seconds / 60)
    print(f"{tokens} tokens in {seconds:.1f} s, {due:.0f} are due")
    assert tokens == pytest.approx(due, rel=0.1)


def offer(urls: list[str], tenant: str, seconds: float) -> tuple[int, int, float]:
    """Ask for so long, mostly through one gateway: the requests that were let in, and their tokens."""
    counts: Counter[str] = Counter()
    began = time.monotonic()

    async def ask(http: httpx.AsyncClient, place: int) -> None:
        url = urls[0] if place % 2 else urls[place % len(urls)]
        while time.monotonic() - began < seconds:
            answer = await http.post(f"{url}{COMPLETIONS}", json=BODY)
            counts[str(answer.status_code)] += 1
            if answer.status_code == 200:
                counts["tokens"] += answer.json()["usage"]["total_tokens"]
            else:
                await asyncio.sleep(0.1)

    async def go() -> None:
        async with httpx.AsyncClient(timeout=60, headers=bearer(tenant)) as http:
            await asyncio.gather(*(ask(http, place) for place in range(12)))

    asyncio.run(go())
    assert set(counts) == {"200", "429", "tokens"}
    return counts["200"], counts["tokens"], time.monotonic() - began
