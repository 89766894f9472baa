"""Bundles of an answer's items: nothing lost, nothing late."""

from __future__ import annotations

import asyncio

import pytest

from serve_apps.engine.protocol import EngineError
from serve_apps.tokens.inbox import Inbox, Item, merge


def item(text: str, last: bool = False) -> Item:
    return {"text": text, "token_ids": [len(text)], **({"finish_reason": "stop"} if last else {})}


def test_a_bundle_is_the_sum_of_its_items() -> None:
    first = {"start": {"replica": "r"}, **item("a")}
    second = {**item("b"), "logprobs": [["b", -1.0, []]], "lead_tokens": 1}
    third = {**item("", last=True), "stop_string": "x", "call_tokens": 2, "lead_tokens": 2}
    assert merge([first, second, third]) == {
        "start": {"replica": "r"},
        "text": "ab",
        "token_ids": [1, 1, 0],
        "logprobs": [["b", -1.0, []]],
        "finish_reason": "stop",
        "stop_string": "x",
        "lead_tokens": 3,
        "call_tokens": 2,
    }


def test_the_first_goes_at_once_the_rest_in_bundles_and_the_last_without_waiting() -> None:
    async def go() -> None:
        inbox = Inbox(lambda: 60.0)
        async with asyncio.timeout(5):
            inbox.put(item("a"))
            assert (await inbox.get())["text"] == "a"
            inbox.put(item("b"))
            waiting = asyncio.ensure_future(inbox.get())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            inbox.put(item("c"))
            inbox.put(item("d", last=True))
            assert await waiting == {"text": "bcd", "token_ids": [1, 1, 1], "finish_reason": "stop"}
            await inbox.ended()

    asyncio.run(go())


def test_after_the_interval_a_bundle_goes_though_more_is_to_come() -> None:
    async def go() -> None:
        inbox = Inbox(lambda: 0.02)
        async with asyncio.timeout(5):
            inbox.put(item("a"))
            assert (await inbox.get())["text"] == "a"
            inbox.put(item("b"))
            inbox.put(item("c"))
            assert (await inbox.get())["text"] == "bc"

    asyncio.run(go())


def test_an_error_comes_after_what_had_arrived() -> None:
    async def go() -> None:
        inbox = Inbox(lambda: 60.0)
        inbox.put(item("a"))
        await inbox.get()
        inbox.put(item("b"))
        inbox.fail(EngineError("rank 1 ended"))
        async with asyncio.timeout(5):
            assert (await inbox.get())["text"] == "b"
            for _ in range(2):
                with pytest.raises(EngineError, match="rank 1"):
                    await inbox.get()

    asyncio.run(go())


def test_what_happens_after_the_last_item_is_no_failure() -> None:
    async def go() -> None:
        inbox = Inbox(lambda: 0.0)
        inbox.put(item("a", last=True))
        inbox.fail(EngineError("the replica was taken down"))
        assert (await inbox.get())["finish_reason"] == "stop"

    asyncio.run(go())
