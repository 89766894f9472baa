"""Serve and the broker are asked at once when something changes, and now and then when nothing does."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from cluster.sharing.demand import Demand
from serve_apps.controller import view as view_module
from serve_apps.controller.app import App
from serve_apps.controller.changes import begin, roll_back
from serve_apps.controller.decision import Decision
from serve_apps.controller.engine_devices import EngineDevices
from serve_apps.controller.serve_state import Served, ServeSeen
from serve_apps.controller.view import ENGINE_SILENT_S, LOOK_EVERY_S, ClusterView
from serve_apps.replica.serve_private import ServeInstance
from serve_apps.spec import GATEWAY
from tests.serve_apps.controller.world import World, spec_of


class Broker:
    """Grants everything; of the nodes that it is asked about, those in `gone` do not answer."""

    gone: ClassVar[set[str]] = set()
    asked: ClassVar[list[set[str]]] = []

    def suspect(self, nodes: Collection[str]) -> list[str]:
        self.asked.append(set(nodes))
        return sorted(self.gone & set(nodes))

    def request(self, demand: Demand) -> Any:
        return SimpleNamespace(nodes=("a", "b", "c")[: demand.max], coming=())

    def alive(self) -> dict[str, bool]:
        return {"a": True, "b": False}

    def release(self, holder: str) -> None:
        raise AssertionError


HOMES = {"1": "a", "2": "b"}


def hear(app: App, replica: str, at: float | None = None, **more: Any) -> None:
    """A replica of the app says how it is."""
    (revision,) = app.record.revisions
    facts = {
        "node": HOMES[replica],
        "state": "ready",
        "failures": 0,
        "parked": None,
        "woken": False,
        "not_woken": "",
        "engine_node": HOMES[replica],
        "devices": f"devices of {replica}",
        "silent_s": 0.0,
        "context_length": 64,
        "revision": revision.number,
        "started_at": "",
        "ready_at": "",
        **more,
    }
    app.hear(revision.application, replica, facts, time.monotonic() if at is None else at)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> tuple[ClusterView, App]:
    """An app that has its two replicas, right after a look."""
    app = App(World(devices=4).serving(1, 2).record)
    (revision,) = app.record.revisions
    served = {revision.application: Served("running", 2, None), "not ours": Served("running", 5, None)}
    seen = ServeSeen(
        ServeInstance("serve-1", "127.0.0.1", 8000), served, {GATEWAY: Served("running", 1, None)}
    )
    monkeypatch.setattr(view_module.serve_state, "look", lambda: seen)
    devices = [
        EngineDevices(f"devices of {replica}", revision.application, replica, node)
        for replica, node in HOMES.items()
    ]
    monkeypatch.setattr(view_module.engine_devices, "look", lambda: devices)
    monkeypatch.setattr(view_module, "living_replicas", lambda: frozenset(HOMES))
    monkeypatch.setattr(view_module, "BrokerClient", Broker)
    app.take(
        Decision(app.record, {revision.number: 2}, frozenset({revision.number}), asks={revision.holder: 2})
    )
    app.wants.want = 2
    for replica in ("1", "2"):
        hear(app, replica)
    monkeypatch.setattr(Broker, "gone", set())
    monkeypatch.setattr(Broker, "asked", [])
    view = ClusterView()
    assert view.is_due([app], time.monotonic())
    for _ in range(2):  # where the replicas are is only known after the first
        view.see()
        view.look([app])
        view.count([app], time.monotonic())
        app.note_grant(view.granted, time.monotonic())
    return view, app


def test_nothing_is_asked_for_a_while_when_all_is_as_it_should_be(settled: tuple[ClusterView, App]) -> None:
    view, app = settled
    now = time.monotonic()
    assert not view.is_due([app], now)
    assert view.is_due([app], now + LOOK_EVERY_S)


def test_it_is_known_which_nodes_are_there_and_stay(settled: tuple[ClusterView, App]) -> None:
    view, _ = settled
    assert view.alive == {"a": True, "b": False}


def test_a_want_is_told_at_once(settled: tuple[ClusterView, App]) -> None:
    view, app = settled
    app.asks = {holder: size + 1 for holder, size in app.asks.items()}
    assert view.is_due([app], time.monotonic())


def test_it_is_looked_at_while_a_want_is_not_granted(settled: tuple[ClusterView, App]) -> None:
    view, app = settled
    app.wants.want = 3
    assert view.is_due([app], time.monotonic())


def test_it_is_looked_at_until_there_are_as_many_replicas_as_there_should_be(
    settled: tuple[ClusterView, App],
) -> None:
    view, app = settled
    (revision,) = app.record.revisions
    view.served = {revision.application: Served("running", 1, None)}
    assert view.is_due([app], time.monotonic())
    view.served = {}
    assert view.is_due([app], time.monotonic())


def test_it_is_looked_at_during_an_update_and_while_an_app_goes(settled: tuple[ClusterView, App]) -> None:
    view, app = settled
    record = app.record
    app.record = begin(record, spec_of(2, "rolling", 2), 0.0)
    assert view.is_due([app], time.monotonic())
    app.record = roll_back(app.record, 0.0)
    assert view.is_due([app], time.monotonic())
    app.record = replace(record, removed=True)
    assert view.is_due([app], time.monotonic())
    assert view.is_due([], time.monotonic())  # its lease is to be released


def test_a_replica_on_a_node_that_does_not_answer_counts_no_more(
    settled: tuple[ClusterView, App], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray takes such a node for alive for a minute, and Serve the replica for running."""
    view, app = settled
    (revision,) = app.record.revisions
    name = revision.application
    app.replicas.forget(name, "2")
    Broker.gone = {"b"}
    view.look([app])
    assert view.lost == {name: 1}
    assert view.nodes == {name: ("a",)}
    view.count([app], time.monotonic())
    assert view.served[name].ready == 1
    view.look([app])
    assert Broker.asked == [{"a", "b"}], "the broker itself goes on asking about the one that is gone"
    monkeypatch.setattr(view_module, "DOUBT_EVERY_S", 0.0)
    view.look([app])
    assert Broker.asked == [{"a", "b"}, {"a"}], "and the other may be lost later"
    assert view.lost == {name: 1}

    hear(app, "2")  # it was only cut off
    view.look([app])
    assert view.lost == {}
    assert view.nodes == {name: ("a", "b")}
    view.count([app], time.monotonic())
    assert view.served[name].ready == 2


def test_a_replica_that_is_silent_on_a_node_that_answers_is_left_to_serve(
    settled: tuple[ClusterView, App],
) -> None:
    view, app = settled
    (revision,) = app.record.revisions
    app.replicas.forget(revision.application, "2")
    view.look([app])
    assert view.lost == {revision.application: 0}
    view.count([app], time.monotonic())
    assert view.served[revision.application].ready == 1, "and gets no requests until it is heard"


def test_an_engine_on_a_node_that_does_not_answer_counts_no_more(settled: tuple[ClusterView, App]) -> None:
    """Its replica is elsewhere, and says that it does not hear the engine."""
    view, app = settled
    (revision,) = app.record.revisions
    hear(app, "1", node="c")
    hear(app, "2", node="c", silent_s=ENGINE_SILENT_S + 1.0)
    Broker.gone = {"b"}
    view.look([app])
    assert view.gone == {"b"}
    assert view.nodes == {revision.application: ("a",)}
    assert view.lost == {}, "the replica itself is there"


def test_a_node_is_asked_where_an_engine_takes_long_to_start(
    settled: tuple[ClusterView, App], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be lost; and one whose start takes minutes is not asked ten times a second."""
    view, app = settled
    for seconds in (ENGINE_SILENT_S - 1.0, ENGINE_SILENT_S + 1.0, ENGINE_SILENT_S + 1.1):
        hear(app, "2", state="starting", silent_s=seconds)
        view.look([app])
    assert Broker.asked == [{"b"}]
    Broker.gone = {"b"}
    view.look([app])
    assert view.gone == set()
    monkeypatch.setattr(view_module, "DOUBT_EVERY_S", 0.0)
    hear(app, "2", state="starting", silent_s=ENGINE_SILENT_S + 2.0)
    view.look([app])
    assert view.gone == {"b"}


def test_the_engine_that_was_ready_first_keeps_its_devices(settled: tuple[ClusterView, App]) -> None:
    """The broker takes the last of what an app holds when it asks for less."""
    view, app = settled
    (revision,) = app.record.revisions
    hear(app, "1", ready_at="2")
    hear(app, "2", ready_at="1")
    view.look([app])
    assert view.nodes == {revision.application: ("b", "a")}
    (demand,) = app.demands(view.nodes)
    assert demand.held == ("b", "a")


def test_serve_says_that_it_runs_and_an_engine_that_it_answers(settled: tuple[ClusterView, App]) -> None:
    view, app = settled
    (revision,) = app.record.revisions
    assert view.served[revision.application].status == "running"
    for replica in HOMES:
        hear(app, replica, state="standby")
    view.count([app], time.monotonic())
    assert view.served[revision.application] == Served("deploying", 0, None)
