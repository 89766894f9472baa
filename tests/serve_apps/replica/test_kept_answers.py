"""An answer goes on when its gateway is gone, and is whole for who asks again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from serve_apps.openai.errors import ApiError
from serve_apps.replica import kept_answers
from serve_apps.replica.kept_answers import KeptAnswer, KeptAnswers
from serve_apps.tokens.inbox import Item, merge

ONCE = {"key": "k/0", "body": "b"}
START = {"replica": "r", "model_version": "m@1"}


class Replica:
    """Generates what it is told to."""

    def __init__(self) -> None:
        self.orphans: list[str] = []
        self.kept = KeptAnswers(self.orphans.extend)
        self.go_on = asyncio.Event()
        self.sent: list[Item] = []
        self.began = self.ended = 0

    async def begin(self, listen: Any = None) -> asyncio.Task[Item]:
        """Have it generate for the gateway `one`, until it has a first item."""
        task = asyncio.create_task(self.generate("one", listen))
        await asyncio.sleep(0)
        return task

    async def generate(self, reader: str = "one", listen: Any = None) -> Item:
        kept = self.kept.begin(ONCE, reader, listen)
        self.began += 1
        try:
            kept.add({"text": "a", "token_ids": [1], "start": START})
            await self.go_on.wait()
            kept.add({"text": "b", "token_ids": [2], "finish_reason": "stop"})
        except BaseException:
            self.kept.fail(kept)
            raise
        finally:
            self.ended += 1
        self.kept.finish(kept)
        return kept.whole

    def find(self) -> KeptAnswer:
        kept = self.kept.find(ONCE)
        assert kept is not None
        return kept


WHOLE = {"text": "ab", "token_ids": [1, 2], "start": START, "finish_reason": "stop"}


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_who_asks_again_is_told_all_of_it_from_the_beginning() -> None:
    async def go() -> None:
        replica, first, second = Replica(), list[Item](), list[Item]()
        task = await replica.begin(first.append)
        replica.kept.gateway_lost("one")
        assert replica.orphans == ["k/0"]
        kept = replica.find()
        await kept.take_over("two", second.append)
        assert second == [{"text": "a", "token_ids": [1], "start": START}]
        replica.go_on.set()
        await kept.ended()
        assert merge(second) == WHOLE
        assert len(first) == 1
        assert await task == WHOLE
        assert replica.began == 1

    run(go())


def test_one_that_was_whole_already_is_given_again() -> None:
    async def go() -> None:
        replica = Replica()
        replica.go_on.set()
        await replica.generate()
        replica.kept.gateway_lost("one")
        assert replica.orphans == ["k/0"]
        second: list[Item] = []
        await replica.find().take_over("two", second.append)
        await replica.find().ended()
        assert second == [WHOLE]

    run(go())


def test_two_who_ask_at_once_do_not_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "BUSY_WAIT_S", 0.05)

    async def go() -> None:
        replica = Replica()
        task = await replica.begin()
        with pytest.raises(ApiError) as caught:
            await replica.find().take_over("two", None)
        assert (caught.value.status, caught.value.code) == (409, "idempotency_key_in_use")
        replica.go_on.set()
        assert await task == WHOLE

    run(go())


def test_who_comes_before_the_loss_is_noticed_waits_for_it() -> None:
    async def go() -> None:
        replica = Replica()
        task = await replica.begin()
        joining = asyncio.create_task(replica.find().take_over("two", None))
        await asyncio.sleep(0.05)
        assert not joining.done()
        replica.kept.gateway_lost("one")
        await joining
        assert replica.find().reader == "two"
        replica.go_on.set()
        await task

    run(go())


def test_another_request_with_the_same_key_is_a_mistake() -> None:
    async def go() -> None:
        replica = Replica()
        replica.go_on.set()
        await replica.generate()
        with pytest.raises(ApiError) as caught:
            replica.kept.find({"key": "k/0", "body": "other"})
        assert (caught.value.status, caught.value.code) == (422, "idempotency_key_reused")
        assert replica.kept.find(None) is None
        assert replica.kept.find({"key": "k/1", "body": "b"}) is None

    run(go())


def test_what_nobody_asks_for_again_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "ORPHAN_S", 0.05)

    async def go() -> None:
        replica = Replica()
        task = await replica.begin()
        replica.kept.gateway_lost("one")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (replica.ended, len(replica.kept)) == (1, 0)

    run(go())


def test_what_was_asked_for_again_goes_on_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "ORPHAN_S", 0.05)

    async def go() -> None:
        replica = Replica()
        task = await replica.begin()
        replica.kept.gateway_lost("one")
        await replica.find().take_over("two", None)
        await asyncio.sleep(0.2)
        replica.go_on.set()
        assert await task == WHOLE

    run(go())


def test_one_that_fails_is_no_answer_for_who_asks_again() -> None:
    async def go() -> None:
        replica = Replica()
        task = await replica.begin()
        replica.kept.gateway_lost("one")
        kept = replica.find()
        await kept.take_over("two", None)
        kept.end()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ApiError) as caught:
            await kept.ended()
        assert caught.value.retry_elsewhere
        assert replica.kept.find(ONCE) is None

    run(go())


def test_few_whole_answers_are_kept_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "MOST_KEPT", 3)
    monkeypatch.setattr(kept_answers, "KEPT_S", 0.05)

    async def go() -> None:
        replica = Replica()
        for number in range(10):
            once = {"key": f"{number}/0", "body": "b"}
            kept = replica.kept.begin(once, "one", None)
            kept.add({"text": "a", "token_ids": [1], "finish_reason": "stop"})
            replica.kept.finish(kept)
        assert len(replica.kept) == 3
        assert replica.kept.find({"key": "9/0", "body": "b"}) is not None
        await asyncio.sleep(0.2)
        assert len(replica.kept) == 0

    run(go())
