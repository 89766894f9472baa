"""A request that a version fails is answered by another, where there is one or may be one soon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from serve_apps.gateway import traffic as traffic_module
from serve_apps.gateway.app_table import AppTable, AppVersion
from serve_apps.gateway.choices import Choices
from serve_apps.gateway.traffic import Traffic
from serve_apps.openai.errors import ApiError
from serve_apps.openai.format import ChoiceEvent
from serve_apps.spec import AppSpec
from serve_apps.tokens.inbox import Item
from tests.serve_apps.stub_gateway import CONFIG

Change = Callable[[Traffic], Awaitable[None]]


def version(revision: int, **changes: Any) -> AppVersion:
    spec = AppSpec("chat", CONFIG, model_path="/nowhere", model_version=f"tiny@{revision}")
    made = AppVersion(f"chat:{revision}", spec, 64, created=1, replicas=1, ready=True, revision=revision)
    return replace(made, **changes)


class Backend:
    """Revision 2 fails: after so many tokens, and while `fail` is set; the first `mute` have no text."""

    def __init__(self, after: int, mute: int) -> None:
        self.after = after
        self.mute = mute
        self.fail = asyncio.Event()
        self.fail.set()
        self.asked: list[int] = []

    async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
        number = int(application.partition(":")[2])
        assert request["revision"] == number
        self.asked.append(number)
        start = {"replica": f"replica-{number}", "model_version": f"tiny@{number}"}
        for step in range(3):
            if number == 2 and step == self.after:
                await self.fail.wait()
                raise ApiError(500, "the engine has failed", kind="server_error")
            text = "" if step < self.mute else f"{number}.{step} "
            item: dict[str, Any] = {"text": text, "token_ids": (step,)}
            if step == 0:
                item["start"] = start
            if step == 2:
                item["finish_reason"] = "length"
            yield item

    async def ask(self, application: str, method: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        raise AssertionError


class Asked:
    """One request while versions change."""

    def __init__(self, *versions: AppVersion, after: int = 0, mute: int = 0, streamed: bool = False) -> None:
        self.traffic = Traffic()
        self.traffic.take_over(AppTable({"chat": versions}, number=1))
        self.backend = Backend(after, mute)
        self.tokens: list[int] = []
        """Of the last start, those that came to be shown."""
        self.streamed = streamed
        self.run: Choices | None = None

    async def text(self, change: Change | None = None) -> str:
        """What it gained after its last start."""
        request = {"request_id": "r-0a1b2c3d-0", "max_tokens": 3, "prompt": "a"}
        texts: list[str] = []
        restartable = not self.streamed
        run = Choices(self.backend, self.traffic, "chat", [request], restartable=restartable, timeout_s=5)
        changing = asyncio.create_task(change(self.traffic)) if change is not None else None
        async with run:
            self.run = run
            async for event in run.events():
                self._note(texts, event)
        if changing is not None:
            await changing
        assert self.traffic.in_flight == {}
        return "".join(texts)

    def _note(self, texts: list[str], event: ChoiceEvent) -> None:
        if event.restarted:
            texts.clear()
            self.tokens.clear()
        texts.append(event.item["text"])
        self.tokens += event.item["token_ids"]


async def later(traffic: Traffic, *versions: AppVersion) -> None:
    await asyncio.sleep(0.05)
    traffic.take_over(AppTable({"chat": versions}, number=2))


BAD = version(2, on_trial=True)
GOOD = version(1)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("other", [GOOD, replace(GOOD, takes=False, stands_by=True)])
def test_it_goes_to_the_other_version_as_a_whole(other: AppVersion, after: int) -> None:
    async def go() -> None:
        asked = Asked(BAD, other, after=after)
        assert await asked.text() == "1.0 1.1 1.2 "
        assert asked.backend.asked == [2, 1]
        assert asked.run is not None
        assert asked.run.model_version == "tiny@1"
        assert asked.run.replicas == ["replica-1"]

    asyncio.run(go())


def test_what_a_version_on_trial_fails_waits_until_it_is_taken_back() -> None:
    async def go() -> None:
        asked = Asked(BAD)
        assert await asked.text(lambda traffic: later(traffic, version(3))) == "3.0 3.1 3.2 "
        assert asked.backend.asked == [2, 3]
        assert asked.traffic.report()["errors"] == {"chat:2 2": 1}

    asyncio.run(go())


def test_where_it_is_not_taken_back_it_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "TRIAL_WAIT_S", 0.05)

    async def go() -> None:
        asked = Asked(BAD)
        with pytest.raises(ApiError, match="the engine has failed"):
            await asked.text()
        assert asked.backend.asked == [2, 2]

    asyncio.run(go())


def test_what_a_version_fails_that_stays_is_an_error_at_once() -> None:
    async def go() -> None:
        asked = Asked(replace(BAD, on_trial=False))
        with pytest.raises(ApiError, match="the engine has failed"):
            await asked.text()
        assert asked.backend.asked == [2]

    asyncio.run(go())


def test_what_fails_while_its_version_is_being_taken_back_waits_for_the_next() -> None:
    async def go() -> None:
        asked = Asked(BAD)
        asked.backend.fail.clear()

        async def change(traffic: Traffic) -> None:
            await asyncio.sleep(0.02)
            traffic.take_over(AppTable({"chat": (replace(BAD, takes=False),)}, number=2))
            asked.backend.fail.set()
            await later(traffic, version(3))

        assert await asked.text(change) == "3.0 3.1 3.2 "

    asyncio.run(go())


def test_a_stream_that_has_shown_nothing_yet_starts_again() -> None:
    async def go() -> None:
        asked = Asked(BAD, GOOD, after=2, mute=2, streamed=True)
        assert await asked.text() == "1.2 "
        assert asked.backend.asked == [2, 1]
        assert asked.tokens == [0, 1, 2]
        assert asked.run is not None
        assert asked.run.replicas == ["replica-1"]

    asyncio.run(go())


def test_a_stream_whose_client_has_tokens_ends_with_the_error() -> None:
    async def go() -> None:
        asked = Asked(BAD, GOOD, after=1, streamed=True)
        with pytest.raises(ApiError, match="the engine has failed"):
            await asked.text()
        assert asked.backend.asked == [2]

    asyncio.run(go())


def test_what_fails_while_its_app_is_taken_down_does_not_wait() -> None:
    async def go() -> None:
        asked = Asked(replace(BAD, on_trial=False))
        asked.backend.fail.clear()

        async def change(traffic: Traffic) -> None:
            await later(traffic, replace(BAD, on_trial=False, takes=False))
            asked.backend.fail.set()

        with pytest.raises(ApiError, match="the engine has failed"):
            await asyncio.wait_for(asked.text(change), 2)

    asyncio.run(go())


class SlowToEnd(Backend):
    """Revision 2 fails its first choice, and takes its time to end the other; revision 1 says nothing."""

    async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
        if application == "chat:2" and request["request_id"].endswith("-0"):
            raise ApiError(500, "the engine has failed", kind="server_error")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.3)
        yield {}


@pytest.mark.parametrize("versions", [(GOOD,), (BAD, GOOD)])
def test_the_time_is_over_whatever_happens_meanwhile(versions: tuple[AppVersion, ...]) -> None:
    async def go() -> None:
        traffic = Traffic()
        traffic.take_over(AppTable({"chat": versions}, number=1))
        requests = [{"request_id": f"r-0a1b2c3d-{i}", "max_tokens": 3, "prompt": "a"} for i in range(2)]
        backend = SlowToEnd(after=0, mute=0)
        async with Choices(backend, traffic, "chat", requests, restartable=True, timeout_s=0.1) as run:
            with pytest.raises(ApiError, match=r"0\.1 s") as over:
                await asyncio.wait_for(anext(run.events()), 10)
        assert (over.value.status, over.value.code) == (504, "timeout")
        assert traffic.in_flight == {}

    asyncio.run(go())
