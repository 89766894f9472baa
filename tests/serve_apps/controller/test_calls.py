"""What the controller has begun: one call of a kind for each Serve application, none lost."""

from __future__ import annotations

import asyncio
import logging

import pytest

from serve_apps.controller.calls import Calls


def test_a_call_is_not_begun_beside_itself_and_its_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        ended, may_end, begun = asyncio.Event(), asyncio.Event(), []

        async def work(name: str) -> None:
            begun.append(name)
            await may_end.wait()
            if name == "bad":
                raise ValueError("no such application")

        calls = Calls(on_end=ended.set)
        calls.begin("start", "chat:1", work("first"))
        calls.begin("start", "chat:1", work("beside it"))
        calls.begin("delete", "chat:1", work("another kind"))
        calls.begin("start", "chat:2", work("bad"))
        await asyncio.sleep(0)
        assert begun == ["first", "another kind", "bad"]
        assert ("start", "chat:1") in calls
        assert ("delete", "chat:2") not in calls
        assert not calls.take_ended()
        may_end.set()
        await ended.wait()
        await asyncio.sleep(0)
        assert ("start", "chat:1") in calls, "until its end has been taken"
        assert calls.take_ended()
        assert not calls

    with caplog.at_level(logging.ERROR):
        asyncio.run(go())
    assert "start chat:2 failed" in caplog.text
    assert "no such application" in caplog.text
