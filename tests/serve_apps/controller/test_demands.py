"""What an app asks of the broker, and on which nodes Serve may put its replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_apps.controller.app import App
from serve_apps.controller.changes import begin
from serve_apps.controller.serve_application import application
from serve_apps.spec import AppSpec
from tests.serve_apps.controller.world import World, spec_of


def with_config(spec: AppSpec, **changes: object) -> AppSpec:
    return replace(spec, config=spec.config.model_copy(update=changes))


def test_a_demand_has_the_apps_priority_weight_and_kind_of_node() -> None:
    record = World(devices=4).serving(1, 1).record
    revisions = tuple(
        replace(each, spec=with_config(each.spec, priority=3, weight=2.0, accelerator="L4"))
        for each in record.revisions
    )
    (demand,) = App(replace(record, revisions=revisions)).demands({})
    assert (demand.priority, demand.weight, demand.accelerator) == (3, 2.0, "L4")
    assert (demand.kind, demand.unit) == ("serving", {"CPU": 1.0})


def test_of_two_versions_that_share_a_lease_those_engines_go_first_that_are_too_many() -> None:
    record = World(devices=4).serving(1, 1).record
    app = App(begin(record, spec_of(2), 1000.0))
    older, newer = (revision.application for revision in app.record.revisions)
    app.sizes = {older: 1, newer: 2}
    (demand,) = app.demands({older: ("a", "b"), newer: ("c", "d")})
    assert demand.held == ("a", "c", "d", "b")


def test_a_replica_of_serves_holds_nothing() -> None:
    spec = with_config(spec_of(1), accelerator="L4", tensor=2, gpus=1)
    config = application(spec, "chat:1", 1)._bound_deployment._replica_config
    assert config.placement_group_bundles is None
    assert config.ray_actor_options["num_cpus"] == 0
    assert not config.ray_actor_options.get("num_gpus")


@pytest.mark.parametrize(("kind", "shared"), [(None, True), ("L4", False)])
def test_versions_on_other_kinds_of_node_have_leases_of_their_own(kind: str | None, shared: bool) -> None:
    record = World(devices=4).serving(1, 1).record
    newer = begin(record, with_config(spec_of(2), accelerator=kind), 1000.0)
    assert (len({revision.holder for revision in newer.revisions}) == 1) is shared
