"""What is made of one request breaks two engines at most, however many there are; others do not notice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from serve_apps.gateway.shared_prompts import LONG_CHARACTERS
from serve_apps.openai.errors import ApiError
from serve_apps.routing.spread import may_take, taken
from serve_apps.tokens.inbox import Item
from tests.serve_apps.stub_gateway import StubGateway

ENGINES = 8
PLACES = 4
STEPS = 6
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
LONG = "poison " + "a" * LONG_CHARACTERS


class Fleet:
    """Eight engines; the least busy one takes a request, as by the gateway's router. A prompt with the word
    `poison` breaks its engine at step `at`, with all that runs there; all engines keep the same time."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.busy: Counter[str] = Counter({f"engine-{number}": 0 for number in range(ENGINES)})
        self.broken: set[str] = set()
        self.asked = 0

    async def generate(self, application: str, request: Mapping[str, Any]) -> AsyncIterator[Item]:
        yield await self.ask(application, "generate", request)

    async def ask(self, application: str, method: str, request: Mapping[str, Any]) -> dict[str, Any]:
        engine = await self._free(request)
        self.asked += 1
        self.busy[engine] += 1
        try:
            for step in range(STEPS):
                if step == self.at and "poison" in str(request):
                    self.broken.add(engine)
                await asyncio.sleep(0.01)
                if engine in self.broken:
                    start = {"replica": engine, "model_version": "tiny@3"}
                    lost = ApiError(503, "broke", kind="server_error", retry_elsewhere=True)
                    return {"start": start, "engine_broke": True, **lost.as_item()}
        finally:
            self.busy[engine] -= 1
        start = {"replica": engine, "model_version": "tiny@3", "prompt_tokens": 2}
        kinds: dict[str, dict[str, Any]] = {
            "generate": {"text": "x", "token_ids": (1,), "finish_reason": "stop"},
            "embed": {"embedding": [1.0, 0.5]},
            "tokenize": {"tokens": [1, 2]},
        }
        return {"start": start, **kinds[method]}

    async def _free(self, request: Mapping[str, Any]) -> str:
        while True:
            for engine in sorted(self.busy, key=lambda engine: self.busy[engine]):
                free = engine not in self.broken and self.busy[engine] < PLACES
                if free and may_take(request, engine):
                    taken(request, engine)
                    return engine
            await asyncio.sleep(0.001)


async def post(gateway: StubGateway, path: str, fields: Mapping[str, Any]) -> tuple[int, Any]:
    async with gateway.client() as client:
        answer = await client.post(path, json={"model": "chat", **fields})
    return answer.status_code, answer.json()


def served_by(fleet: Fleet) -> StubGateway:
    gateway = StubGateway(queue=100, batch=PLACES)
    gateway.service.backend = fleet
    return gateway


@pytest.mark.parametrize("at", [0, STEPS - 1], ids=["first step", "last step"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "poison", "n": 3}),
        (COMPLETIONS, {"prompt": "poison", "n": 8}),
        (COMPLETIONS, {"prompt": "poison", "n": 40}),
        (COMPLETIONS, {"prompt": ["poison"] * 8}),
        (COMPLETIONS, {"prompt": ["good", *["poison"] * 8]}),
        (COMPLETIONS, {"prompt": [*["good"] * 12, *["poison"] * 8]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "poison"}], "n": 8}),
        (COMPLETIONS, {"prompt": [f"{LONG} {number}" for number in range(8)], "n": 2}),
        (EMBEDDINGS, {"input": ["poison"] * 8}),
        (EMBEDDINGS, {"input": ["good", *["poison"] * 30]}),
        ("/score", {"text_1": "poison", "text_2": ["poison"] * 8}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_one_request_breaks_two_engines_at_most(path: str, fields: dict[str, Any], at: int) -> None:
    async def go() -> None:
        fleet = Fleet(at)
        gateway = served_by(fleet)
        others = [asyncio.create_task(post(gateway, COMPLETIONS, {"prompt": "good"})) for _ in range(ENGINES)]
        await asyncio.sleep(0)
        status, answer = await post(gateway, path, fields)
        assert (status, answer["error"]["code"]) == (400, "engines_broke")
        assert len(fleet.broken) <= 2
        assert [(await other)[0] for other in others] == [200] * ENGINES
        assert +Counter(gateway.service.traffic.report()["errors"]) == {}
        assert gateway.service.traffic.in_flight == {}

    asyncio.run(go())


def test_many_parts_of_a_good_request_are_all_answered() -> None:
    async def go() -> None:
        fleet = Fleet(0)
        gateway = served_by(fleet)
        answers = await asyncio.gather(
            post(gateway, COMPLETIONS, {"prompt": "good", "n": 40}),
            post(gateway, COMPLETIONS, {"prompt": ["good"] * 20}),
            post(gateway, EMBEDDINGS, {"input": ["good"] * 20}),
        )
        assert [status for status, _ in answers] == [200] * 3
        choices = [len(answer.get("choices", answer.get("data"))) for _, answer in answers]
        assert (choices, fleet.asked) == ([40, 20, 20], 80)

    asyncio.run(go())


def test_a_good_request_that_loses_engines_to_another_goes_on() -> None:
    async def go() -> None:
        fleet = Fleet(0)
        gateway = served_by(fleet)
        good = asyncio.create_task(post(gateway, COMPLETIONS, {"prompt": "good", "n": 4}))
        await asyncio.sleep(0.02)
        fleet.broken.add(next(engine for engine, busy in fleet.busy.items() if busy))
        assert (await good)[0] == 200

    asyncio.run(go())
