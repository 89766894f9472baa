"""A storage that hangs for one app, and deletes that drain: the other apps are looked after all the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray
from ray import serve
from ray.serve import context

from cluster.files.storage import Storage
from serve_apps.controller import actor as actor_module
from serve_apps.controller import serve_application, serve_state
from serve_apps.controller import view as view_module
from serve_apps.controller.actor import AppController
from serve_apps.controller.record import AppRecord
from serve_apps.controller.serve_state import Served, ServeSeen
from serve_apps.controller.store import AppStore
from serve_apps.controller.view import ClusterView
from serve_apps.replica.handles import ReplicaHandles
from serve_apps.replica.serve_private import ServeInstance
from serve_apps.spec import GATEWAY
from tests.serve_apps.controller.world import spec_of

WITHIN_S = 5.0


class View(ClusterView):
    """A cluster on which nothing runs yet, and everything is granted."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        # Serve is there, and the gateway on it.
        self.there = ServeSeen(
            ServeInstance("serve-1", "127.0.0.1", 8000), {}, {GATEWAY: Served("running", 1, None)}
        )

    def is_due(self, apps: Any, now: float) -> bool:
        return True

    def see(self) -> None:
        self.serve = self.there

    def look(self, apps: Any) -> None:
        self.looks += 1
        self.grants = {revision.holder: ("n",) * 4 for app in apps for revision in app.record.revisions}


def with_controller(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    go: Callable[[AppController, View], Coroutine[Any, Any, None]],
    view: View | None = None,
) -> list[str]:
    """Run a controller over a cluster of nobody's; the Serve applications that were started."""
    started: list[str] = []
    monkeypatch.setattr(actor_module, "show_life", lambda _: asyncio.sleep(3600))
    monkeypatch.setattr(view_module, "living_replicas", frozenset)
    monkeypatch.setattr(serve_application, "start", lambda spec, name, size: started.append(name))
    monkeypatch.setattr(ReplicaHandles, "connect", lambda self, applications, serve: None)

    async def run() -> None:
        controller = AppController(
            {"storage": str(folder), "name": "c", "cluster_id": "id", "head_ip": "192.0.2.9"},
            lambda info: None,
        )
        seen = view or View()
        for each in (controller, controller._lookout, controller._engines, controller._execution):
            each._view = seen
        async with asyncio.timeout(30):
            await go(controller, seen)

    asyncio.run(run())
    return started


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


def named(name: str) -> dict[str, Any]:
    return replace(spec_of(1), name=name).as_json()


def test_a_storage_that_hangs_for_one_app_holds_up_that_app_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, save, event = threading.Event(), AppStore.save, AppStore.event

    def slow_save(self: AppStore, record: AppRecord) -> None:
        if record.name == "slow":
            hold.wait(30)
        save(self, record)

    def slow_event(self: AppStore, name: str, kind: str, facts: Any) -> None:
        if name == "eventful":
            hold.wait(30)
        event(self, name, kind, facts)

    monkeypatch.setattr(AppStore, "save", slow_save)
    monkeypatch.setattr(AppStore, "event", slow_event)

    async def go(controller: AppController, view: View) -> None:
        slow = asyncio.create_task(controller.apply(named("slow")))
        for name in ("quick", "eventful"):
            async with asyncio.timeout(WITHIN_S):
                await controller.apply(named(name))
        await until(lambda: all(controller._apps[name].sizes for name in ("quick", "eventful")))
        async with asyncio.timeout(WITHIN_S):
            assert {"quick", "eventful"} <= (await controller.describe()).keys()
            await controller.remove("quick")
        assert not slow.done()
        hold.set()
        await slow
        await until(lambda: bool(controller._apps["slow"].sizes))

    try:
        started = with_controller(tmp_path, monkeypatch, go)
    finally:
        hold.set()
    assert {"quick:1", "eventful:1", "slow:1"} <= set(started)
    store = AppStore(Storage(tmp_path), "c", "id")
    assert store.events("eventful")[0]["kind"] == "began", "late, and not lost"


def test_deletes_that_drain_hold_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    monkeypatch.setattr(serve_application, "delete", lambda name: hold.wait(30))

    async def go(controller: AppController, view: View) -> None:
        for number in range(12):
            controller._execution.delete(f"old-{number}:1")
        await controller.apply(named("new"))
        await until(lambda: bool(controller._apps["new"].sizes))
        looks = view.looks
        await until(lambda: view.looks > looks + 2)
        hold.set()

    try:
        assert "new:1" in with_controller(tmp_path, monkeypatch, go)
    finally:
        hold.set()


def test_the_leases_are_renewed_while_serve_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = threading.Event()
    monkeypatch.setattr(view_module, "SEE_S", 0.05)
    monkeypatch.setattr(View, "see", lambda self: hold.wait(30))

    async def go(controller: AppController, view: View) -> None:
        await controller.apply(named("chat"))
        await until(lambda: view.looks > 2)
        row = (await controller.describe())["chat"]
        assert "Serve does not answer" in row["note"]
        assert not controller._apps["chat"].sizes, "nothing is decided about what is not seen"
        hold.set()

    try:
        with_controller(tmp_path, monkeypatch, go)
    finally:
        hold.set()


def test_a_proxy_of_serves_that_hangs_holds_up_no_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, start = threading.Event(), serve_application.start
    given: list[str] = []

    class Client(context.ServeControllerClient):  # as Serve's is, but for the controller that it asks
        def __init__(self) -> None:
            self._shutdown = False
            self._controller = MagicMock()

        def wait_for_proxies_serving(self, wait_for_applications_running: bool = True) -> None:
            hold.wait(30)

    def run_many(targets: list[Any], **_: Any) -> None:
        given.append(targets[0].name)
        client.deploy_applications([], **_)

    class LooksAtServe(View):
        def see(self) -> None:
            serve_state.look()
            super().see()

    client, view = Client(), LooksAtServe()
    monkeypatch.setattr(context, "_global_client", client)
    monkeypatch.setattr(ray, "get", lambda reference: reference)
    monkeypatch.setattr(serve, "run_many", run_many)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}, proxies={}))
    monkeypatch.setattr(serve_application, "application", MagicMock())
    monkeypatch.setattr(serve, "RunTarget", lambda target, name, route_prefix: SimpleNamespace(name=name))
    for module in (serve_application, serve_state):
        monkeypatch.setattr(module, "find_serve", lambda: view.there.instance)
    monkeypatch.setattr(view_module, "SEE_S", 0.5)

    async def go(controller: AppController, view: View) -> None:
        monkeypatch.setattr(serve_application, "start", start)
        await controller.apply(named("first"))
        await until(lambda: given == ["first:1"])
        await controller.apply(named("second"))
        await until(lambda: "second:1" in given and not view.silence)

    try:
        with_controller(tmp_path, monkeypatch, go, view)
    finally:
        hold.set()
