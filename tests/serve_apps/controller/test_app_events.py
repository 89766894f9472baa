"""What an app tells of itself: that it wants another number of replicas, and that a new one is ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cluster.config.serve_section import ReplicasConfig
from cluster.storage import Storage
from serve_apps.controller.app import App
from serve_apps.controller.gateways import Gateways
from serve_apps.controller.store import AppStore
from tests.serve_apps.controller.world import World

FACTS = {
    "revision": 1,
    "context_length": 64,
    "started_at": "2026-01-01T12:00:00.000+00:00",
    "ready_at": "2026-01-01T12:00:03.500+00:00",
}


def test_a_replica_is_told_of_once_with_its_times() -> None:
    app = App(World(devices=4).serving(1, 1).record)
    told = [app.hear("chat:1", replica, FACTS, now) for now, replica in enumerate(["a", "b", "a", "b"])]
    times = {"started_at": FACTS["started_at"], "ready_at": FACTS["ready_at"]}
    assert told[:2] == [("replica_ready", {"replica": each, "revision": 1, **times}) for each in "ab"]
    assert told[2:] == [None, None]
    # It was silent for so long that it counts no more, and then it was heard again.
    assert app.reports("chat:1", 100) == []
    assert app.hear("chat:1", "a", FACTS, 101) is None


def test_a_want_is_told_of_when_it_changes() -> None:
    record = World(devices=4).serving(1, 1).record
    (revision,) = record.revisions
    config = revision.spec.config.model_copy(update={"replicas": ReplicasConfig(min=1, max=3)})
    revision = replace(revision, spec=replace(revision.spec, config=config))
    app, scale = App(replace(record, revisions=(revision,))), config.autoscale
    gateways = Gateways()

    def told(requests: int, now: float) -> object:
        report = {"seen": 1, "in_flight": {"chat:1": requests}, "waiting": {}, "requests": {}, "errors": {}}
        gateways.report("g", report, now)
        return app.update_want(gateways, {}, now)

    many = int(scale.target_ongoing_requests * 10)
    assert told(0, 0.0) == ("wanted", {"replicas": 1, "before": 0, "ongoing": 0.0})
    assert told(many, 1.0) is None
    facts = {"replicas": 3, "before": 1, "ongoing": float(many)}
    assert told(many, 1.0 + scale.upscale_delay_s) == ("wanted", facts)
    assert told(many, 2.0 + scale.upscale_delay_s) is None


def test_events_can_be_read_back_without_a_line_that_was_cut_off(tmp_path: Path) -> None:
    store = AppStore(Storage(tmp_path), "c", "id")
    assert store.events("chat") == []
    store.event("chat", "wanted", {"replicas": 2})
    store.event("chat", "replica_ready", {"replica": "a"})
    with (tmp_path / "serving/c/chat/events.jsonl").open("a") as file:
        file.write('{"time": "2026-')
    assert [event["kind"] for event in store.events("chat")] == ["wanted", "replica_ready"]
    assert store.events("chat")[0]["replicas"] == 2
