"""How many replicas Serve is told to have, beside those with an engine."""

from __future__ import annotations

from dataclasses import replace

from cluster.config.sections.serve import ReplicasConfig
from serve_apps.controller.app import App
from tests.serve_apps.controller.test_app_events import FACTS
from tests.serve_apps.controller.world import World

APP = "chat:1"


def app_with(replicas: ReplicasConfig) -> App:
    record = World(devices=4).serving(1, 1).record
    (revision,) = record.revisions
    config = revision.spec.config.model_copy(update={"replicas": replicas})
    return App(replace(record, revisions=(replace(revision, spec=replace(revision.spec, config=config)),)))


def test_none_is_started_beside_the_first_and_then_as_many_as_are_wanted() -> None:
    app = app_with(ReplicasConfig(min=1, max=12, standby=6))
    assert app.standing(APP) is None, "nothing is decided yet"
    app.sizes[APP] = 1
    assert app.standing(APP) == 1
    app.hear(APP, "a", FACTS, 0.0)
    assert app.standing(APP) == 7
    app.sizes[APP] = 3
    assert app.standing(APP) == 9


def test_there_are_no_more_than_the_app_may_have_and_one_for_a_loss() -> None:
    app = app_with(ReplicasConfig(min=1, max=4, standby=10))
    app.hear(APP, "a", FACTS, 0.0)
    app.sizes[APP] = 1
    assert app.standing(APP) == 4
    app.sizes[APP] = 4
    assert app.standing(APP) == 5


def test_there_are_never_fewer_than_there_once_were() -> None:
    app = app_with(ReplicasConfig(min=1, max=8))
    app.hear(APP, "a", FACTS, 0.0)
    app.sizes[APP] = 5
    assert app.standing(APP) == 6
    app.sizes[APP] = 1
    assert app.standing(APP) == 6


def test_an_app_at_zero_has_those_that_stand_by() -> None:
    app = app_with(ReplicasConfig(min=0, max=8, standby=3))
    app.sizes[APP] = 0
    app.hear(APP, "a", FACTS, 0.0)
    app.hear(APP, "a", {**FACTS, "state": "standby"}, 0.0)
    assert app.standing(APP) == 3
