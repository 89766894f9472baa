"""An engine that breaks counts against its version, unless one request broke it, as a second engine shows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from serve_apps.gateway.app_table import AppTable
from serve_apps.gateway.backend import ReplicaLostError
from serve_apps.gateway.broken_engines import VERDICT_S, BrokenEngines, Suspect
from serve_apps.gateway.choices import Choices
from serve_apps.gateway.traffic import Traffic
from serve_apps.openai.errors import ApiError
from serve_apps.tokens.inbox import Item
from tests.serve_apps.gateway.test_choices import version


class Counted:
    """What counts against versions, and a clock that the test turns."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.now = 0.0
        self.broken = BrokenEngines(self._count, lambda: self.now)

    def _count(self, key: str, failures: int) -> None:
        self.failures[key] += failures

    def suspects(self, number: int) -> list[Suspect]:
        return [Suspect(self.broken, parts=1) for _ in range(number)]


def test_what_failed_counts_once_all_that_saw_it_have_ended() -> None:
    counted = Counted()
    one, other = counted.suspects(2)
    one.saw("a", "v2", at_once=False)
    one.saw("a", "v2", at_once=False)  # its second choice
    other.saw("a", "v2", at_once=False)
    assert not one.guilty
    one.end()
    counted.broken.settle()
    assert counted.failures == {}
    other.end()
    assert counted.failures == {"v2": 3}


def test_nothing_counts_that_failed_with_the_engines_which_one_request_broke() -> None:
    counted = Counted()
    guilty, first, second = counted.suspects(3)
    for suspect in (guilty, first):
        suspect.saw("a", "v2", at_once=False)
    first.end()
    for suspect in (second, guilty):
        suspect.saw("b", "v1", at_once=False)
    assert [suspect.guilty for suspect in (guilty, first, second)] == [True, False, False]
    for suspect in (guilty, second):
        suspect.end()
    assert +counted.failures == {}


def test_who_sees_it_after_the_guilty_request_has_ended_counts_for_nothing_either() -> None:
    counted = Counted()
    guilty, late, later = counted.suspects(3)
    for engine in ("a", "b"):
        guilty.saw(engine, "v2", at_once=False)
    guilty.end()
    late.saw("b", "v2", at_once=True)
    late.end()
    counted.now = VERDICT_S
    counted.broken.settle()
    assert +counted.failures == {}
    later.saw("b", "v2", at_once=True)  # it is not remembered for ever
    assert counted.failures == {"v2": 1}


def test_what_counted_at_once_is_taken_back() -> None:
    counted = Counted()
    guilty, other = counted.suspects(2)
    other.saw("a", "v2", at_once=True)
    guilty.saw("a", "v2", at_once=True)
    assert counted.failures == {"v2": 2}
    guilty.saw("b", "v2", at_once=True)
    assert counted.failures == {"v2": 0}
    other.end()
    guilty.end()
    assert counted.failures == {"v2": 0}


def test_a_request_that_goes_on_for_long_holds_nothing_back_for_ever() -> None:
    counted = Counted()
    long, short = counted.suspects(2)
    for suspect in (long, short):
        suspect.saw("a", "v2", at_once=False)
    short.end()
    counted.now = VERDICT_S - 0.1
    counted.broken.settle()
    assert counted.failures == {}
    counted.now = VERDICT_S
    counted.broken.settle()
    counted.broken.settle()
    assert counted.failures == {"v2": 2}
    long.saw("b", "v2", at_once=False)
    assert counted.failures == {"v2": 0}, "found out late"


class Engines:
    """One engine of each version after the other; a prompt `poison` breaks it, with all that runs there."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._broken: dict[str, asyncio.Event] = {}
        self._number: Counter[str] = Counter()

    async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
        engine = f"{application} {self._number[application]}"
        broken = self._broken.setdefault(engine, asyncio.Event())
        self.asked.append(engine)
        if request["prompt"] == "poison":
            await asyncio.sleep(0.01)
            self._number[application] += not broken.is_set()
            broken.set()
        try:
            async with asyncio.timeout(0.03):
                await broken.wait()
            raise ReplicaLostError("its process ended", engine)
        except TimeoutError:
            start = {"replica": engine, "model_version": application}
            yield {"start": start, "text": "x", "token_ids": (1,), "finish_reason": "stop"}

    async def ask(self, application: str, method: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        raise AssertionError


async def ask(traffic: Traffic, engines: Engines, prompt: str, n: int = 1) -> str:
    requests = [{"request_id": "r-0a1b2c3d-0", "prompt": prompt}] * n
    run = Choices(engines, traffic, "chat", requests, restartable=True, timeout_s=5)
    try:
        async with run:
            return "".join([event.item["text"] async for event in run.events()])
    except ApiError as error:
        return error.code or ""


@pytest.mark.parametrize("on_trial", [True, False])
def test_two_requests_that_break_engines_take_back_no_good_update(on_trial: bool) -> None:
    async def go() -> None:
        traffic, engines = Traffic(), Engines()
        update = version(2, on_trial=on_trial)
        traffic.take_over(AppTable({"chat": (update, version(1))}, number=1))
        assert await asyncio.gather(*(ask(traffic, engines, "good") for _ in range(6))) == ["x"] * 6
        traffic.report()
        prompts = ["poison", "good", "good", "good", "poison", "good"]
        answers = await asyncio.gather(*(ask(traffic, engines, prompt) for prompt in prompts))
        assert answers[0] == answers[4] == "engines_broke"
        assert +Counter(traffic.report()["errors"]) == {}
        assert traffic.in_flight == {}

    asyncio.run(go())


def test_a_version_that_breaks_under_what_another_answers_is_to_blame() -> None:
    async def go() -> None:
        traffic = Traffic()

        class Weak(Engines):
            async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
                if application == "chat:2":
                    raise ReplicaLostError("its process ended", f"{application} {len(self.asked)}")
                async for item in super().generate(application, request):
                    yield item

        traffic.take_over(AppTable({"chat": (version(2, on_trial=True), version(1))}, number=1))
        engines = Weak()
        answers = await asyncio.gather(*(ask(traffic, engines, "good") for _ in range(8)))
        assert answers == ["x"] * 8
        assert traffic.report()["errors"]["chat:2 2"] >= 2

    asyncio.run(go())


def test_the_choices_of_a_request_that_lose_one_engine_together_are_tried_again() -> None:
    async def go() -> None:
        traffic = Traffic()
        traffic.take_over(AppTable({"chat": (version(1),)}, number=1))

        class Once(Engines):
            async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
                self.asked.append("once")
                if len(self.asked) <= 3:
                    raise ReplicaLostError("its process ended", "the first")
                async for item in super().generate(application, request):
                    yield item

        assert await ask(traffic, Once(), "good", n=3) == "xxx"
        assert traffic.report()["errors"] == {"chat:1 1": 3}

    asyncio.run(go())
