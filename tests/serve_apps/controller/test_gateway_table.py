"""What gateways are told of the apps, and under which number."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_apps.controller.gateway_table import GatewayTable
from serve_apps.gateway.app_table import AppTable
from tests.serve_apps.stub_gateway import StubGateway

STARTS: dict[str, Any] = {"versions": [], "applications": ["chat-1"], "wanted": 1, "granted": 0}


def test_what_changes_has_a_new_number() -> None:
    table = GatewayTable(7)
    assert table.publish({"chat": STARTS}) == 8
    assert table.publish({"chat": STARTS}) == 8
    assert table.publish({"chat": {**STARTS, "wanted": 2}}) == 9
    assert table.publish({}) == 10
    assert table.apps == {}


def test_who_waits_for_another_table_has_it_at_once() -> None:
    async def go() -> None:
        table = GatewayTable(7)
        assert await table.news(6, 10.0), "there is one already"
        waiting = asyncio.create_task(table.news(7, 10.0))
        await asyncio.sleep(0)
        table.publish({})
        await asyncio.sleep(0)
        assert not waiting.done(), "it is the same"
        table.publish({"chat": STARTS})
        async with asyncio.timeout(1.0):
            assert await waiting
        assert not await table.news(8, 0.01)

    asyncio.run(go())


async def _ask(apps: dict[str, Any], model: str) -> tuple[int, str, bool]:
    gateway = StubGateway()
    gateway.table = AppTable.from_json(9, apps)
    gateway.service.table = gateway.table
    async with gateway.client() as client:
        answer = await client.post("/v1/completions", json={"model": model, "prompt": "a"})
        error = answer.json()["error"]
        return answer.status_code, error["code"], "Retry-After" in answer.headers


@pytest.mark.parametrize(
    ("model", "expected"),
    [("chat", (503, "unavailable", True)), ("nobody", (404, "model_not_found", False))],
)
def test_who_asks_for_an_app_that_goes_with_its_cluster_is_told_to_come_again(
    model: str, expected: tuple[int, str, bool]
) -> None:
    table = GatewayTable(1)
    table.publish({"chat": STARTS, "other": STARTS})
    table.leave({"chat"})
    table.publish({})  # by then it is on its way out
    assert asyncio.run(_ask(table.apps, model)) == expected


def test_an_app_that_is_served_after_all_is_told_as_it_is() -> None:
    table = GatewayTable(1)
    table.leave({"chat"})
    table.publish({"chat": STARTS})
    assert table.apps == {"chat": STARTS}
