"""All that serves is killed, or hangs, under load: what its clients see, and that it comes back.

`tests/benchmarks/serving_failures.py` does the same again and again, and prints how long it takes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from serve_apps.gateway import deployment as gateway
from serve_apps.replica import deployment as replica
from tests.clusters import LiveCluster, started
from tests.serve_apps import driver
from tests.serve_apps.drill_load import COMPLETIONS
from tests.serve_apps.drills import (
    DRILLS,
    FAKE,
    STEP_TIMEOUT_S,
    THREE_WORKERS,
    TORCH,
    App,
    Stage,
    ranks_of,
    run_drill,
    staged,
    until,
)
from tests.serve_apps.fake_engine import make_fake_model

FOUND_WITHIN_S = {
    "rank killed": 10.0,
    "rank 0 killed": 10.0,
    "rank hung": STEP_TIMEOUT_S + 10.0,
    "rank 0 hung": replica.HANG_TIMEOUT_S + 10.0,
    "raylet killed": 30.0,
    "Serve's controller and rank 0 killed": 10.0,
}
GATEWAY_BACK_S = 25.0
RETRIES = 6
"""Of the OpenAI client: it waits for about 20 s in all between so many."""


@contextmanager
def openai_client_at_work(stage: Stage) -> Iterator[list[str]]:
    """An OpenAI client that asks again and again; what it was answered."""
    client = openai.OpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=RETRIES, timeout=30)
    answers: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                answer = client.completions.create(model="chat", prompt=[10], max_tokens=3)
                answers.append(answer.choices[0].text)
            except openai.OpenAIError as error:
                answers.append(repr(error))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_a_killed_gateway_comes_back_and_a_client_that_retries_does_not_notice(
    running_cluster: LiveCluster, tmp_path: Path
) -> None:
    with (
        staged(running_cluster, FAKE, tmp_path / "model", tensor=1) as stage,
        openai_client_at_work(stage) as answers,
    ):
        report = run_drill("gateway killed", stage)
    assert report.failed == []
    assert report.wrong == 0
    assert report.broken > 0
    assert report.back_s < GATEWAY_BACK_S
    assert set(answers) == {" 11 12 13"}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "later_s"), [("hang", 0.0), ("freeze", replica.HANG_TIMEOUT_S)])
def test_a_replica_that_hangs_while_it_starts_gives_way_to_another(
    running_cluster: LiveCluster, tmp_path: Path, how: str, later_s: float
) -> None:
    ready_timeout_s = 12.0
    app = replace(FAKE, ready_timeout_s=ready_timeout_s)
    with staged(running_cluster, app, tmp_path / "model", tensor=1) as stage:
        make_fake_model(stage.model_path, fails=how)
        os.kill(stage.replicas()[0].pid, signal.SIGKILL)
        until(lambda: list(stage.model_path.glob("hangs-*")), 30)
        (mark,) = stage.model_path.glob("hangs-*")
        make_fake_model(stage.model_path)
        until(
            lambda: not psutil.pid_exists(int(mark.name.partition("-")[2])),
            10 + ready_timeout_s + later_s,
        )
        until(lambda: stage.call(driver.running_replicas, "chat") == 2, 30)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with started(tmp_path_factory.mktemp("cluster"), *THREE_WORKERS) as live:
        yield live


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest, cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """An app of two replicas of two ranks each, and room for a third."""
    app: App = request.param
    with staged(cluster, app, tmp_path_factory.mktemp("models") / "model") as stage:
        yield stage


def ranks_that_hang(stage: Stage) -> list[psutil.Process]:
    found = [rank for notes in stage.replicas() for rank in ranks_of(notes.pid)]
    return [rank for rank in found if rank.status() == psutil.STATUS_STOPPED]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        (TORCH, "rank killed"),
        (TORCH, "rank 0 killed"),
        (TORCH, "rank hung"),
        (TORCH, "rank 0 hung"),
        (FAKE, "Serve's controller and rank 0 killed"),
    ],
    indirect=["stage"],
)
def test_a_lost_replica_costs_its_own_streams_and_nobody_else_anything(stage: Stage, kind: str) -> None:
    report = run_drill(kind, stage)
    assert report.failed == []
    assert report.wrong == 0
    assert report.in_flight > 0
    # What it had was answered elsewhere or, where the client had seen something, ended with an error event.
    assert report.retried + report.ended >= report.in_flight
    assert report.gone_s is not None
    assert report.gone_s < FOUND_WITHIN_S[kind]
    assert ranks_that_hang(stage) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [FAKE], indirect=True)
@pytest.mark.parametrize("kind", ["Serve's controller killed", "apps' controller killed"])
def test_without_a_controller_nobody_notices_anything(stage: Stage, kind: str) -> None:
    report = run_drill(kind, stage)
    assert report.answered == report.requests
    assert report.wrong == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [FAKE], indirect=True)
@pytest.mark.parametrize("kind", ["gateway hung", "gateway and apps' controller killed"])
def test_a_gateway_comes_back_from_anything(stage: Stage, kind: str) -> None:
    report = run_drill(kind, stage)
    assert report.failed == []
    assert report.wrong == 0
    assert report.back_s < gateway.HANG_TIMEOUT_S + GATEWAY_BACK_S


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [FAKE], indirect=True)
def test_what_a_killed_gateway_had_asked_for_is_ended_or_waited_for(stage: Stage) -> None:
    """A stream that its client has seen the beginning of is not; an answer in one piece is, by the front."""
    stream = {"model": "chat", "prompt": [10], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    whole = {**stream, "max_tokens": 500, "stream": False}  # 20 s, and 5 s
    named = {"x-request-id": "whole.1"}
    with (
        httpx.stream("POST", stage.url + COMPLETIONS, json=stream, timeout=60) as answer,
        ThreadPoolExecutor(1) as pool,
    ):
        lines = answer.iter_lines()
        next(lines)
        asking = pool.submit(httpx.post, stage.url + COMPLETIONS, json=whole, headers=named, timeout=60)
        until(lambda: stage.generations("whole.1") == 1, 10)
        assert len(stage.running()) == 2
        stage.process("ray::ServeReplica:gateway").kill()
        with pytest.raises(httpx.TransportError):
            list(lines)
        until(lambda: len(stage.running()) == 1, 10)
        assert asking.result().status_code == 200, asking.result().text
        assert asking.result().json()["usage"]["completion_tokens"] == 500
        assert stage.generations("whole.1") == 1

    def back() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{stage.url}/ready").status_code == 200
        return False

    until(back, GATEWAY_BACK_S)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [FAKE], indirect=True)
def test_the_openai_client_is_told_that_its_stream_has_lost_its_replica(stage: Stage) -> None:
    client = openai.OpenAI(base_url=f"{stage.url}/v1", api_key="none")
    raw = client.completions.with_raw_response.create(model="chat", prompt=[10], max_tokens=200, stream=True)
    (victim,) = [notes for notes in stage.replicas() if notes.replica == raw.headers["x-shoal-replica"]]
    chunks = iter(raw.parse())
    texts = [next(chunks).choices[0].text]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(openai.APIError) as ended:
        texts.extend(chunk.choices[0].text for chunk in chunks)
    assert ended.value.code == "replica_lost"
    assert texts[0].startswith(" 11")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [FAKE], indirect=True)
def test_a_killed_raylet_costs_the_streams_of_its_node(stage: Stage) -> None:
    kind = "raylet killed"
    report = run_drill(kind, stage)
    assert report.failed == []
    assert report.wrong == 0
    assert report.retried + report.ended >= report.in_flight > 0
    assert report.gone_s is not None
    assert report.gone_s < FOUND_WITHIN_S[kind]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_is_drained_costs_nobody_anything(tmp_path: Path) -> None:
    with started(tmp_path, *THREE_WORKERS) as live, staged(live, FAKE, tmp_path / "model") as stage:
        report = run_drill("node drained", stage)
    assert report.answered == report.requests
    assert (report.failed, report.ended, report.wrong) == ([], 0, 0)


def test_there_is_a_drill_of_each_kind() -> None:
    assert set(DRILLS) == {
        *FOUND_WITHIN_S,
        "node drained",
        "gateway killed",
        "gateway hung",
        "gateway and apps' controller killed",
        "Serve's controller killed",
        "apps' controller killed",
    }
