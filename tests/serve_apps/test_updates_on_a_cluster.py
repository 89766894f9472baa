"""New versions of an app under load on a real cluster: nobody's request fails, whatever the version is like.

One app `chat` on one cluster; each test brings it to the version from which it goes on, if it is not there.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config.sections.serve import ServeAppConfig
from cluster.errors import ShoalError
from cluster.files.storage import Storage
from cluster.models.registry import Registry
from serve_apps.models import find_model
from serve_apps.spec import AppSpec
from tests.clusters import LiveCluster
from tests.serve_apps import driver
from tests.serve_apps.driver import Driver
from tests.serve_apps.fake_engine import make_fake_model
from tests.serve_apps.load import COMPLETIONS, under_load

ENGINE = "tests.serve_apps.fake_engine:FakeEngine"
CLIENTS = 4
"""Of the 16 requests that two replicas run at once."""


@dataclass(frozen=True)
class Served:
    url: str
    directory: Path
    call: Driver

    def spec(self, version: int, rollout: str = "rolling", fails: str = "", **update: Any) -> AppSpec:
        path = self.directory / str(version)
        if not path.exists():
            make_fake_model(path, offset=1000 * version, **({"fails": fails} if fails else {}))
        config = ServeAppConfig.model_validate(
            {
                "model": str(path),
                "replicas": {"min": 2},
                "rollout": rollout,
                "update": {"hold_s": 1.0, "watch_s": 1.0, **update},
                "limits": {"max_tokens": 1000, "queue": 100, "batch": 8, "request_timeout_s": 30.0},
            }
        )
        return AppSpec("chat", config, model_path=str(path), model_version=f"m@{version}", engine=ENGINE)

    def deploy(self, spec: AppSpec) -> None:
        self.call(driver.deploy, spec)

    def serve_first(self, version: int) -> None:
        """Have `version` served, before what the test is about."""
        if self.row()["model"] != f"m@{version}":
            self.deploy(self.spec(version))
        eventually(lambda: (self.row()["status"], self.row()["replicas"]) == ("running", 2))

    def row(self) -> dict[str, Any]:
        row = self.call(driver.status, "chat")
        assert row is not None
        return row


@pytest.fixture(scope="module")
def served(running_cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Driver(running_cluster.record) as call:
        served = Served(call(driver.start), tmp_path_factory.mktemp("models"), call)
        served.deploy(served.spec(1))
        yield served
        call(driver.stop)


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it did not happen in time"
        threading.Event().wait(0.1)


WAYS = ["rolling", "blue_green", "in_place"]
FAULTS = ["start", "probes", "requests"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rollout", "before", "after"),
    [
        ("rolling", 1, 2),
        ("in_place", 2, 3),  # which the quickstart has, too
        ("blue_green", 3, 4),
    ],
)
def test_a_new_version_takes_over_and_no_request_fails(
    served: Served, rollout: str, before: int, after: int
) -> None:
    served.serve_first(before)
    with under_load(served.url, CLIENTS) as load:
        eventually(lambda: len(load.answers) > 2 * CLIENTS)
        served.deploy(served.spec(after, rollout))
        since = len(load.answers)
        eventually(lambda: len(load.answers) > since + 2 * CLIENTS)
    assert load.failed == []
    assert load.mixed() == []
    assert load.versions() == [f"m@{before}", f"m@{after}"]
    # From the moment that the command has returned, everybody gets the new one.
    assert {answer.version for answer in load.answers[since + CLIENTS :]} == {f"m@{after}"}
    rollout_row = served.row()["rollout"]
    assert rollout_row["strategy"] == rollout
    eventually(lambda: served.row()["rollout"]["status"] == "succeeded")
    eventually(lambda: served.row()["replicas"] == 2)
    assert list(served.call(driver.leases)) == ["app/chat"]


@pytest.mark.slow
def test_it_goes_back_by_hand_at_once_while_blue_green_holds(served: Served) -> None:
    served.serve_first(4)
    with under_load(served.url, CLIENTS) as load:
        eventually(lambda: len(load.answers) > CLIENTS)
        served.deploy(served.spec(5, "blue_green", hold_s=60))
        assert served.row()["status"] == "holding"
        began = time.monotonic()
        row = served.call(driver.roll_back, "chat")
        seconds = time.monotonic() - began
    assert row["model"] == "m@4"
    assert row["rollout"]["status"] == "rolled_back"
    assert seconds < 15
    assert load.failed == []
    assert load.mixed() == []
    assert load.versions() == ["m@4", "m@5"]
    assert load.answers[-1].version == "m@4"


@pytest.mark.slow
def test_a_newer_config_supersedes_the_update_that_is_under_way(served: Served) -> None:
    served.serve_first(4)
    with under_load(served.url, CLIENTS) as load:
        eventually(lambda: len(load.answers) > CLIENTS)
        served.deploy(served.spec(5, "blue_green", hold_s=60))
        assert served.row()["status"] == "holding"
        served.deploy(served.spec(6))
    assert served.row()["model"] == "m@6"
    assert served.row()["rollout"]["status"] == "succeeded"
    assert load.failed == []
    assert load.mixed() == []
    assert load.answers[-1].version == "m@6"


@pytest.mark.slow
@pytest.mark.parametrize(("rollout", "fails"), [(way, fault) for fault in FAULTS for way in WAYS])
def test_a_version_that_fails_goes_back_by_itself(served: Served, rollout: str, fails: str) -> None:
    served.serve_first(4)
    number = 10 + 3 * FAULTS.index(fails) + WAYS.index(rollout)
    spec = served.spec(number, rollout, fails, watch_s=60, hold_s=60)
    if rollout == "in_place" and fails == "start":
        # What is read before anything changes.
        (Path(spec.model_path) / "model.safetensors").write_bytes(b"no weights")
    with under_load(served.url, CLIENTS) as load:
        eventually(lambda: len(load.answers) > CLIENTS)
        if fails == "requests":
            # It takes over, or starts to, and is brought back by its errors.
            with suppress(ShoalError):
                served.deploy(spec)
        else:
            with pytest.raises(ShoalError, match=rf"could not be changed to m@{number}; it still serves m@4"):
                served.deploy(spec)
        eventually(lambda: served.row()["model"] == "m@4" and served.row()["status"] == "running")
        if fails == "requests":
            assert "requests failed" in served.row()["rollout"]["reason"]
        since = len(load.answers)
        eventually(lambda: len(load.answers) > since + CLIENTS)
    # A request that fails at it is tried again at the other version, or waits until that is back.
    assert load.failed == []
    assert load.mixed() == []
    assert load.answers[-1].version == "m@4"
    eventually(lambda: served.row()["replicas"] == 2)


@pytest.mark.slow
def test_a_killed_controller_goes_on_where_it_was(served: Served) -> None:
    with under_load(served.url, CLIENTS) as load:
        number = served.call(driver.apply, served.spec(30))
        eventually(lambda: served.row()["rollout"]["ready"] >= 1)
        os.kill(served.call(driver.controller_pid), signal.SIGKILL)
        eventually(lambda: served.row()["rollout"]["status"] == "succeeded")
    assert number > 0
    assert load.failed == []
    assert load.mixed() == []
    assert served.row()["model"] == "m@30"


@pytest.mark.slow
def test_an_app_that_may_have_no_replicas_starts_one_for_the_first_request(served: Served) -> None:
    spec = served.spec(31)
    idle = {"replicas": {"min": 0, "max": 2}, "autoscale": {"downscale_delay_s": 0.5, "idle_s": 1.0}}
    config = ServeAppConfig.model_validate({**spec.config.model_dump(mode="json"), **idle})
    served.deploy(AppSpec("chat", config, spec.model_path, spec.model_version, engine=ENGINE))
    eventually(lambda: served.row()["replicas"] == 0)
    eventually(lambda: served.row()["status"] == "idle")
    assert served.call(driver.leases)["app/chat"]["granted"] == 0
    with httpx.Client(base_url=served.url) as http:
        assert http.get("/ready").status_code == 200
    with under_load(served.url, 3) as load:
        eventually(lambda: len(load.answers) >= 6)
    assert load.failed == []
    assert load.mixed() == []
    assert load.versions() == ["m@31"]
    eventually(lambda: served.row()["replicas"] == 0)
    with httpx.Client(base_url=served.url, timeout=60) as http:
        answer = http.post(COMPLETIONS, json={"model": "chat", "prompt": [7], "max_tokens": 2})
        assert answer.status_code == 200


@pytest.mark.slow
def test_an_app_follows_its_models_name_and_leaves_alone_what_failed(
    served: Served, running_cluster: LiveCluster
) -> None:
    registry = Registry(Storage(running_cluster.record.storage))
    storage = running_cluster.record.storage

    def publish(**behaviour: Any) -> None:
        number = len(registry.versions("m")) + 1 if "m" in registry.names() else 1
        path = make_fake_model(served.directory / f"published-{number}", offset=1000 * number, **behaviour)
        registry.publish("m", path, {})

    def serves(version: int) -> bool:
        row = served.row()
        return (row["model"], row["status"]) == (f"m@{version}", "running")

    publish()
    config = served.spec(1).config.model_copy(update={"model": "m@latest"})
    served.deploy(replace(find_model("chat", config, storage), engine=ENGINE))
    with under_load(served.url, CLIENTS) as load:
        publish()
        eventually(lambda: serves(2))
        assert running_cluster.shoal("rollback", "chat").returncode == 0
        assert serves(1)
        # What it was taken back from is not followed to again; what comes next is.
        threading.Event().wait(5)
        assert serves(1)
        publish(fails="probes")
        eventually(lambda: served.row()["rollout"]["status"] == "failed")
        assert serves(1)
        publish()
        eventually(lambda: serves(4))
        status = json.loads(running_cluster.shoal("status", "--json").stdout)
    assert load.failed == []
    assert load.mixed() == []
    assert load.versions() == ["m@1", "m@2", "m@4"]
    (row,) = status["apps"]
    told = row["rollout"]
    assert (told["from_version"], told["to_version"], told["status"]) == ("m@1", "m@4", "succeeded")
    assert "m@latest changed" in told["reason"]

    config = config.model_copy(update={"model": "m@stable"})
    assert running_cluster.shoal("promote", "m@4", "stable").returncode == 0
    served.deploy(replace(find_model("chat", config, storage), engine=ENGINE))
    assert running_cluster.shoal("promote", "m@2", "stable").returncode == 0
    eventually(lambda: serves(2))
