"""One handle to each Serve application, for as long as that is there."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from serve_apps.controller.app import App
from serve_apps.controller.changes import begin
from serve_apps.controller.record import AppRecord
from serve_apps.replica.handles import ReplicaHandles
from tests.serve_apps.controller.world import spec_of


def test_an_application_has_one_handle_while_it_is_there() -> None:
    async def go() -> None:
        handles = ReplicaHandles()
        assert handles.find("chat:1") is None
        handles.connect({"chat:1"}, "serve-1")
        first = handles.find("chat:1")
        assert first is not None
        assert first.app_name == "chat:1"
        handles.connect({"chat:1", "chat:2"}, "serve-1")
        assert handles.find("chat:1") is first
        handles.connect({"chat:2"}, "serve-1")
        assert handles.find("chat:1") is None
        await asyncio.sleep(0)

    asyncio.run(go())


def test_the_applications_of_another_serve_have_other_handles() -> None:
    async def go() -> None:
        handles = ReplicaHandles()
        handles.connect({"chat:1"}, "serve-1")
        first = handles.find("chat:1")
        handles.connect({"chat:1"}, "serve-2")
        second = handles.find("chat:1")
        assert second is not None
        assert second is not first
        await asyncio.sleep(0)

    asyncio.run(go())


def test_the_table_has_the_applications_that_cannot_take_requests_too() -> None:
    record = begin(AppRecord("chat"), spec_of(1), 0.0)
    record = replace(record, active=1, update=None)
    record = begin(record, spec_of(2), 0.0, way="in_place")
    app = App(record)
    # Nothing has been heard of a replica yet; the second revision may come to need an application of its own.
    assert app.table({}) == {
        "versions": [],
        "applications": ["chat:1", "chat:2"],
        "wanted": app.wants.want,
        "granted": 0,
    }


def test_an_app_that_is_gone_has_used_its_numbers() -> None:
    record = replace(begin(AppRecord("chat"), spec_of(1), 0.0), update=None, removed=True)
    assert not record.gone
    gone = AppRecord.from_json(record.without(1).as_json())
    assert (gone.gone, gone.newest) == (True, 1)
