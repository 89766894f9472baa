"""How many replicas Serve is told to have, beside those with an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

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


def heard(app: App, count: int) -> None:
    """One replica has an engine, the others stand by."""
    for number in range(count):
        state = "standby" if number else FACTS["state"]
        app.hear(APP, str(number), {**FACTS, "state": state}, 0.0)


@pytest.mark.parametrize(("standby", "all_of_them"), [(6, 6), (None, 11)])
def test_none_is_started_beside_the_first_and_then_few_at_once(standby: int | None, all_of_them: int) -> None:
    app = app_with(ReplicasConfig(min=1, max=12, standby=standby))
    assert app.standing(APP) is None, "nothing is decided yet"
    app.sizes[APP] = 1
    assert app.standing(APP) == 1
    counts = []
    for _ in range(10):
        heard(app, app.standing(APP) or 0)
        counts.append(app.standing(APP))
    assert counts[:2] == [3, 5]
    assert counts[-1] == 1 + all_of_them
    app.sizes[APP] = 3
    assert app.standing(APP) == 3 + min(all_of_them, 9), "these begin at once: two more than were there"


def test_a_controller_that_is_back_takes_over_how_many_serve_has() -> None:
    app = app_with(ReplicasConfig(min=1, max=12, standby=6))
    app.sizes[APP] = 1
    assert app.standing(APP, 7) == 7, "not one was heard yet"
    app.hear(APP, "a", FACTS, 0.0)
    assert app.standing(APP, 7) == 7
    shrunk = app_with(ReplicasConfig(min=1, max=12, standby=6))
    shrunk.sizes[APP] = 1
    assert shrunk.standing(APP, 11) == 11, "there were five with an engine"


def test_one_that_takes_the_place_of_a_lost_one_is_not_one_more() -> None:
    app = app_with(ReplicasConfig(min=2, max=2))
    app.sizes[APP] = 2
    heard(app, 3)
    assert app.standing(APP, 2) == 3
    for number in range(3, 9):  # each is killed, and the next one is there before its silence means an end
        app.hear(APP, str(number), {**FACTS, "state": "standby"}, float(number))
        assert app.standing(APP, 3) == 3
    for number in range(9, 12):
        app.hear(APP, str(number), FACTS, float(number))
        assert app.standing(APP, 3) == 3


def test_there_are_no_more_than_the_app_may_have_and_one_for_a_loss() -> None:
    app = app_with(ReplicasConfig(min=1, max=4, standby=10))
    heard(app, 4)
    app.sizes[APP] = 1
    assert app.standing(APP) == 4
    app.sizes[APP] = 4
    assert app.standing(APP) == 5


def test_there_are_never_fewer_than_there_once_were() -> None:
    app = app_with(ReplicasConfig(min=1, max=8, standby=1))
    heard(app, 5)
    app.sizes[APP] = 5
    assert app.standing(APP) == 6
    app.sizes[APP] = 1
    assert app.standing(APP) == 6


def test_an_app_at_zero_has_those_that_stand_by() -> None:
    app = app_with(ReplicasConfig(min=0, max=8, standby=3))
    app.sizes[APP] = 0
    heard(app, 2)
    app.hear(APP, "0", {**FACTS, "state": "standby"}, 0.0)
    assert app.standing(APP) == 3
