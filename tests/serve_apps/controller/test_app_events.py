"""What an app tells of itself: that it wants another number of replicas, and that a new one is ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.sections.serve import AutoscaleConfig, LimitsConfig, ReplicasConfig
from cluster.files.storage import Storage
from serve_apps.controller.app import App
from serve_apps.controller.gateways import Gateways
from serve_apps.controller.serve_state import Served
from serve_apps.controller.store import AppStore
from tests.serve_apps.controller.world import World

FACTS = {
    "node": "n",
    "state": "ready",
    "failures": 0,
    "parked": None,
    "woken": False,
    "not_woken": "",
    "engine_node": "n",
    "devices": "d",
    "revision": 1,
    "context_length": 64,
    "started_at": "2026-01-01T12:00:00.000+00:00",
    "ready_at": "2026-01-01T12:00:03.500+00:00",
}


def test_a_replica_is_told_of_once_with_its_times() -> None:
    app = App(World(devices=4).serving(1, 1).record)
    told = [app.hear("chat:1", replica, FACTS, now) for now, replica in enumerate(["a", "b", "a", "b"])]
    times = {"started_at": FACTS["started_at"], "ready_at": FACTS["ready_at"], "woken": False}
    assert told[:2] == [("replica_ready", {"replica": each, "revision": 1, **times}) for each in "ab"]
    assert told[2:] == [None, None]
    # It was silent for so long that it counts no more, and then it was heard again.
    assert app.replicas.ready("chat:1", 100) == []
    assert app.hear("chat:1", "a", FACTS, 101) is None
    # It has given its engine back, and has another one.
    assert app.hear("chat:1", "a", {**FACTS, "state": "standby"}, 102) is None
    again = {**FACTS, "started_at": "2026-01-01T13:00:00.000+00:00", "not_woken": "it differs"}
    told = app.hear("chat:1", "a", again, 103)
    assert told is not None
    assert told[1]["not_woken"] == "it differs"


def test_a_replica_is_told_of_once_though_ray_does_not_list_it_yet_and_forgotten_when_it_is_dead() -> None:
    app = App(World(devices=4).serving(1, 1).record)
    assert app.hear("chat:1", "a", FACTS, 0.0) is not None
    app.keep_homes(())
    assert app.hear("chat:1", "a", FACTS, 1.0) is None
    assert app.replicas.ready("chat:1", 100) == []
    app.keep_homes(())
    # Nothing is known any more of one that is dead: this is as if it had never been heard.
    assert app.hear("chat:1", "a", FACTS, 101) is not None


def test_a_want_is_told_of_when_it_changes() -> None:
    record = World(devices=4).serving(1, 1).record
    (revision,) = record.revisions
    config = revision.spec.config.model_copy(update={"replicas": ReplicasConfig(min=1, max=3)})
    revision = replace(revision, spec=replace(revision.spec, config=config))
    app, scale = App(replace(record, revisions=(revision,))), config.autoscale
    gateways = Gateways()

    def told(requests: int, now: float) -> object:
        counts: dict[str, dict[str, int]] = {"requests": {}, "errors": {}, "asked": {}}
        report = {"seen": 1, "number": 1, "in_flight": {"chat:1": requests}, "waiting": {}, **counts}
        gateways.report("g", report, now)
        return app.update_want(gateways, {}, now)

    many = int(scale.target_ongoing_requests * 10)
    assert told(0, 0.0) == ("wanted", {"replicas": 1, "before": 0, "ongoing": 0.0})
    assert told(many, 1.0) is None
    facts = {"replicas": 3, "before": 1, "ongoing": float(many)}
    assert told(many, 1.0 + scale.upscale_delay_s) == ("wanted", facts)
    assert told(many, 2.0 + scale.upscale_delay_s) is None


def test_where_the_replicas_have_room_the_mean_of_the_load_counts() -> None:
    record = World(devices=4).serving(1, 1).record
    (revision,) = record.revisions
    scale = AutoscaleConfig(target_ongoing_requests=4, upscale_delay_s=0, look_back_period_s=10)
    changed = {"replicas": ReplicasConfig(min=1, max=3), "autoscale": scale, "limits": LimitsConfig(batch=8)}
    config = revision.spec.config.model_copy(update=changed)
    revision = replace(revision, spec=replace(revision.spec, config=config))
    app, gateways = App(replace(record, revisions=(revision,))), Gateways()
    served = {revision.application: Served("running", 1, None)}

    def want(requests: int, now: float) -> int:
        counts: dict[str, dict[str, int]] = {"requests": {}, "errors": {}, "asked": {}}
        report = {"seen": 1, "number": 1, "in_flight": {"chat:1": requests}, "waiting": {}, **counts}
        gateways.report("g", report, now)
        app.update_want(gateways, served, now)
        return app.wants.want

    assert [want(requests, now) for now, requests in ((0, 2), (10, 7), (11, 7), (12, 2))] == [1, 1, 1, 1]
    assert [want(requests, now) for now, requests in ((20, 7), (21, 7), (26, 7))] == [1, 1, 2], "for long"
    assert want(8, 26.1) == 2
    assert want(9, 26.2) == 3, "one waits"


def wants_over_time(pause_s: float, until_s: float, *, asks_until_s: float) -> list[tuple[float, int]]:
    """The want of an app with `min: 0` at each look, while a request of no length comes every so often."""
    record = World(devices=4).serving(1, 1).record
    (revision,) = record.revisions
    config = revision.spec.config.model_copy(update={"replicas": ReplicasConfig(min=0, max=3)})
    revision = replace(revision, spec=replace(revision.spec, config=config))
    app, gateways = App(replace(record, revisions=(revision,))), Gateways()
    found, asked, number = [], 0, 0
    for look in range(int(until_s / 0.5)):
        now = look * 0.5
        if now <= asks_until_s and now >= asked * pause_s:
            asked, number = asked + 1, number + 1
            counts = {"requests": {"chat:1 1": 1}, "errors": {}, "asked": {"chat": 1}}
            gateways.report("g", {"seen": 1, "number": number, "in_flight": {}, "waiting": {}, **counts}, now)
        app.update_want(gateways, {}, now)
        found.append((now, app.wants.want))
    return found


@pytest.mark.parametrize("pause_s", [1.0, 10.0, 50.0])
def test_an_app_in_steady_use_is_never_taken_to_zero(pause_s: float) -> None:
    wants = wants_over_time(pause_s, 400.0, asks_until_s=300.0)
    assert {want for now, want in wants if 1.0 < now <= 300.0} == {1}
    ended = next(now for now, want in wants if want == 0 and now > 1.0)
    last = max(asked * pause_s for asked in range(400) if asked * pause_s <= 300.0)
    assert 60.0 <= ended - last <= 62.0, "idle_s after the last request, and not again"
    assert {want for now, want in wants if now > ended} == {0}


def test_events_outlive_the_controller_where_the_storage_cannot_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Storage, "appendable", False)
    for _ in range(2):
        store = AppStore(Storage(tmp_path), "c", "id")
        store.event("chat", "wanted", {"replicas": 2})
        store.event("chat", "replica_ready", {"replica": "a"})
    assert [event["kind"] for event in store.events("chat")] == ["wanted", "replica_ready"] * 2


def test_events_can_be_read_back_without_a_line_that_was_cut_off(tmp_path: Path) -> None:
    store = AppStore(Storage(tmp_path), "c", "id")
    assert store.events("chat") == []
    store.event("chat", "wanted", {"replicas": 2})
    store.event("chat", "replica_ready", {"replica": "a"})
    with (tmp_path / "serving/c/chat/events.jsonl").open("a") as file:
        file.write('{"time": "2026-')
    assert [event["kind"] for event in store.events("chat")] == ["wanted", "replica_ready"]
    assert store.events("chat")[0]["replicas"] == 2
