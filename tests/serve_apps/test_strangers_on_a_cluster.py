"""Strangers' Serve applications beside Shoal's: they are reached, and whoever ends Serve takes nothing of
Shoal's away for long."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config.sections.serve import AutoscaleConfig, ReplicasConfig, ServeAppConfig
from cluster.hosts.endpoints import free_port
from serve_apps.spec import AppSpec
from tests.clusters import HEAD_AND_TWO, LiveCluster, started
from tests.serve_apps import driver
from tests.serve_apps.background import in_background
from tests.serve_apps.driver import Driver
from tests.serve_apps.fake_engine import make_fake_model
from tests.serve_apps.strangers import (
    eventually,
    get,
    interrupt,
    listens,
    serve_command,
    serve_run,
    write_app,
)

BACK_S = 30.0
"""Within which Shoal's app answers again, whoever has ended Serve; on an idle machine it is a third of it."""
SAID_S = 60.0


@dataclass(frozen=True)
class Shoal:
    """The app `chat` of Shoal's on a cluster."""

    cluster: LiveCluster
    call: Driver
    spec: AppSpec
    folder: Path
    """With the modules of strangers' applications."""

    @property
    def gateway(self) -> str:
        return self.cluster.record.gateway_url

    def answers(self) -> bool:
        with suppress(httpx.TransportError):
            body = {"model": "chat", "prompt": [10], "max_tokens": 3}
            answer = httpx.post(f"{self.gateway}/completions", json=body, timeout=5)
            return answer.status_code == 200 and answer.json()["choices"][0]["text"] == " 11 12 13"
        return False

    def serve(self) -> None:
        """What `shoal serve chat` does."""
        self.call(driver.start)
        self.call(driver.deploy, self.spec)

    def told(self, kind: str) -> int:
        """How many events of this kind the app has had."""
        return sum(event["kind"] == kind for event in self.row()["events"])

    def row(self) -> dict[str, Any]:
        row = self.call(driver.status, "chat")
        assert row is not None
        return row


@pytest.fixture
def shoal(running_cluster: LiveCluster, tmp_path: Path) -> Iterator[Shoal]:
    model = make_fake_model(tmp_path / "model")
    config = ServeAppConfig.model_validate({"model": str(model), "replicas": {"min": 1, "max": 1}})
    spec = AppSpec(
        "chat", config, str(model), model_version="fake@1", engine="tests.serve_apps.fake_engine:FakeEngine"
    )
    folder = tmp_path / "strangers"
    folder.mkdir()
    write_app(folder, "hello", "hello from a stranger")
    with Driver(running_cluster.record) as call:
        try:
            yield Shoal(running_cluster, call, spec, folder)
        finally:
            call(driver.stop)


@contextmanager
def leases_are_kept(shoal: Shoal) -> Iterator[None]:
    """Meanwhile the app keeps its lease, and holds no more than that allows."""
    wrong: list[Any] = []

    def look(stop: threading.Event) -> None:
        with Driver(shoal.cluster.record) as call:
            while not stop.is_set():
                lease = call(driver.leases).get("app/chat")
                held = len(call(driver.replica_nodes, "chat"))
                if lease is None or lease["granted"] != 1 or held > 1:
                    wrong.append((lease, held))
                stop.wait(0.3)

    with in_background(look):
        yield
    assert wrong == []


def ctrl_c(shoal: Shoal) -> None:
    """Somebody runs an application of theirs, and ends it."""
    with serve_run(shoal.cluster, shoal.folder, "hello:app") as program:
        assert get(shoal.cluster.record.serve_url) == "hello from a stranger"
        assert shoal.answers()
        interrupt(program)


def shut_down(shoal: Shoal) -> None:
    serve_command(shoal.cluster, shoal.folder, "shutdown", "-y")


def end_for_good(shoal: Shoal) -> None:
    """Serve's controller ends for ever, and leaves gateway and replicas behind."""
    shoal.call(driver.end_serves_controller)


def kill_serves_controller(shoal: Shoal) -> None:
    (controller,) = shoal.cluster.processes("ray::ServeController")
    controller.kill()


@pytest.mark.slow
def test_shoals_app_comes_back_after_a_stranger_has_ended_serve(shoal: Shoal) -> None:
    shoal.serve()
    assert shoal.answers()
    with leases_are_kept(shoal):
        ctrl_c(shoal)
        # Whoever asks now is told why it is away.
        said = shoal.row()["note"] or ""
        assert "somebody else" in said or shoal.answers()
        took = eventually(shoal.answers, BACK_S)
    print(f"Shoal's app answered again {took:.1f} s after the stranger's command had ended")
    kinds = [event["kind"] for event in shoal.row()["events"]]
    assert "serve_ended" in kinds
    eventually(lambda: shoal.row()["note"] is None, SAID_S)
    document = json.loads(shoal.cluster.shoal("status", "--json").stdout)
    assert document["serve"]["url"] == shoal.cluster.record.serve_url
    assert document["serve"]["status"] == "running"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", [ctrl_c, shut_down, end_for_good, kill_serves_controller])
def test_it_comes_back_each_time(shoal: Shoal, end: Callable[[Shoal], None]) -> None:
    shoal.serve()
    with leases_are_kept(shoal):
        for number in range(1, 4):
            end(shoal)
            took = eventually(shoal.answers, BACK_S)
            print(f"{end.__name__}: back after {took:.1f} s")
            if end is not kill_serves_controller:  # which Ray brings back
                eventually(lambda: shoal.told("serve_back") == number, SAID_S)  # noqa: B023
                assert shoal.told("serve_ended") == number
            assert shoal.row()["note"] is None
            eventually(lambda: len(shoal.cluster.processes("ray::ServeController")) == 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["shutdown", "ctrl-c"])
def test_a_stranger_who_was_first_is_reached_and_may_end_serve(shoal: Shoal, how: str) -> None:
    for number in range(3):
        if number:
            shoal.call(driver.stop)
        with serve_run(shoal.cluster, shoal.folder, "hello:app") as program:
            shoal.serve()
            assert shoal.answers()
            assert get(shoal.cluster.record.serve_url) == "hello from a stranger"
            if how == "ctrl-c":
                interrupt(program)
            else:
                shut_down(shoal)
            took = eventually(shoal.answers, BACK_S)
            print(f"{how}: back after {took:.1f} s")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_serve_deploy_replaces_what_it_deployed_and_nothing_of_shoals(shoal: Shoal) -> None:
    shoal.serve()
    write_app(shoal.folder, "other", "another stranger")
    url = shoal.cluster.record.serve_url
    for name, words in (("hello", "hello from a stranger"), ("other", "another stranger")):
        config = {
            "proxy_location": "EveryNode",
            "http_options": {"host": "0.0.0.0", "port": 8000},
            "applications": [
                {
                    "name": name,
                    "route_prefix": f"/{name}",
                    "import_path": f"{name}:app",
                    "runtime_env": {"env_vars": {"PYTHONPATH": str(shoal.folder)}},
                }
            ],
        }
        (shoal.folder / "config.yaml").write_text(json.dumps(config))
        serve_command(shoal.cluster, shoal.folder, "deploy", "config.yaml")
        eventually(lambda: get(f"{url}/{name}") == words, 60)  # noqa: B023
        assert shoal.answers()
    eventually(lambda: get(f"{url}/hello") is None)
    assert "chat:" in serve_command(shoal.cluster, shoal.folder, "status")
    assert shoal.row()["status"] == "running"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("later_s", [0.0, 0.5, 1.0, 2.0, 4.0])
def test_shoal_serve_works_at_every_moment_of_an_end(shoal: Shoal, later_s: float) -> None:
    shoal.serve()
    shut_down(shoal)
    threading.Event().wait(later_s)
    began = time.monotonic()
    other = replace(shoal.spec, name="other")
    shoal.call(driver.start)
    shoal.call(driver.deploy, other)
    shoal.serve()
    assert time.monotonic() - began < 2 * BACK_S
    assert shoal.answers()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_gateway_that_outlives_serve_finds_the_replicas_of_the_next_one(shoal: Shoal) -> None:
    shoal.serve()
    (gateway,) = shoal.cluster.processes("ray::ServeReplica:gateway")
    end_for_good(shoal)
    eventually(lambda: shoal.told("serve_back") == 1, BACK_S)
    for replica in shoal.cluster.processes("ray::ServeReplica:chat"):
        os.kill(replica.pid, signal.SIGKILL)
    eventually(lambda: not shoal.answers() or shoal.row()["replicas"] == 0, 10)
    eventually(shoal.answers, BACK_S)
    assert shoal.cluster.processes("ray::ServeReplica:gateway") == [gateway]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_who_follow_a_controller_that_ended_for_good_follow_the_next(shoal: Shoal) -> None:
    changes = {
        "replicas": ReplicasConfig(min=1, max=2),
        "autoscale": AutoscaleConfig(target_ongoing_requests=1.0, upscale_delay_s=0.5),
    }
    spec = replace(shoal.spec, config=shoal.spec.config.model_copy(update=changes))
    shoal.call(driver.start)
    shoal.call(driver.deploy, spec)
    shoal.call(driver.end_apps_controller)
    shoal.call(driver.start)
    eventually(lambda: shoal.row()["status"] == "running", BACK_S)

    def ask() -> None:
        body = {"model": "chat", "prompt": [10], "max_tokens": 1500}
        assert httpx.post(f"{shoal.gateway}/completions", json=body, timeout=90).status_code == 200

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        # The gateway has told of the load, Serve has been told the size, and the new replica has reported.
        eventually(lambda: shoal.row()["replicas"] == 2, BACK_S)
        for each in asking:
            each.result()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_serve_listens_where_the_config_says_before_anything_is_served(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    write_app(tmp_path, "hello", "hello from a stranger")
    with started(tmp_path / "cluster", *HEAD_AND_TWO, f"serve_proxy: {{port: {port}}}") as cluster:
        assert cluster.record.serve_url.endswith(f":{port}")
        assert listens(cluster.record.serve_url)
        with serve_run(cluster, tmp_path, "hello:app"):
            assert get(cluster.record.serve_url) == "hello from a stranger"
        # Nothing of Shoal's was served, and yet the port stays true.
        eventually(lambda: listens(cluster.record.serve_url), BACK_S)
