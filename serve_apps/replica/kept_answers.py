"""Answers that a client may ask for again: they outlive the gateway that has asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_apps.openai.errors import ApiError, replica_lost
from serve_apps.tokens.inbox import Item, merge

ORPHAN_S = 60.0
"""How long an answer whose gateway is gone is generated, and kept, for who asks again."""
KEPT_S = 10.0
"""How long a whole answer is kept whose gateway has it, and may not have given it on yet."""
MOST_KEPT = 256
"""Whole answers that are kept; the oldest go first."""
BUSY_WAIT_S = 2.0
"""How long who asks again waits until the loss of the gateway that asked first is noticed."""

_SEPARATOR = "/"

Listen = Callable[[Item], None]
"""Is given each item of an answer as it comes."""


def key_of_part(request: str, part: int) -> str:
    """The key of a part of a request.

    >>> parts_of(key_of_part("a", 2))
    ('a', 2)
    """
    return f"{request}{_SEPARATOR}{part}"


def parts_of(key: str) -> tuple[str, int]:
    """The request's key, and which part of it."""
    request, _, part = key.rpartition(_SEPARATOR)
    return request, int(part)


class KeptAnswer:
    """One part of an answer: what it has gained so far, and who is told of what it gains.

    Args:
        body: the digest of the request; another request with the same key is a mistake.
        end: ends what is generated.
    """

    def __init__(self, key: str, body: str, end: Callable[[], object]) -> None:
        self.key = key
        self.body = body
        self.is_whole = False
        self.reader: str | None = None
        """The endpoint of the gateway that it is for; None: that is gone."""
        self._end = end
        self._items: list[Item] = []
        self._listen: Listen | None = None
        self._changed = asyncio.Event()
        self._failed = False

    def add(self, item: Item) -> None:
        """It gains an item."""
        self._items.append(item)
        if self._listen is not None:
            self._listen(item)

    @property
    def whole(self) -> Item:
        """All of it as one item."""
        return merge(self._items)

    async def take_over(self, reader: str, listen: Listen | None) -> None:
        """Be for this gateway from now on, which is told what there is, and what comes.

        Raises:
            ApiError: 409, another gateway has it still.
        """
        if self.reader is not None and not self.is_whole:
            try:
                async with asyncio.timeout(BUSY_WAIT_S):
                    while self.reader is not None and not self._is_over:
                        await self._changed.wait()
            except TimeoutError:
                raise ApiError(
                    409,
                    "A request with this idempotency key is being answered; try again when that has ended.",
                    code="idempotency_key_in_use",
                    headers={"Retry-After": "1"},
                ) from None
        self.reader, self._listen = reader, listen
        if self._items:
            self._items = [self.whole]
            if listen is not None:
                listen(self._items[0])

    async def ended(self) -> None:
        """Wait until it is whole.

        Raises:
            ApiError: it will not be; another replica may do better.
        """
        while not self._is_over:
            await self._changed.wait()
        if self._failed:
            raise replica_lost()

    def release(self) -> None:
        """Its gateway is gone."""
        self.reader = self._listen = None
        self._tell()

    def finish(self) -> None:
        """It is whole."""
        self.is_whole = True
        self._items = [self.whole]
        self._tell()

    def fail(self) -> None:
        """It will not be whole."""
        self._failed = True
        self._tell()

    def end(self) -> None:
        """Nobody wants it any more."""
        if not self._is_over:
            self._end()

    @property
    def _is_over(self) -> bool:
        return self.is_whole or self._failed

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class KeptAnswers:
    """Those of one replica, by key: one for each part of a request.

    Args:
        on_orphans: is told the keys of those whose gateway is gone.
    """

    def __init__(self, on_orphans: Callable[[Sequence[str]], object]) -> None:
        self._on_orphans = on_orphans
        self._kept: dict[str, KeptAnswer] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def find(self, once: Mapping[str, Any] | None) -> KeptAnswer | None:
        """The answer to a request that was sent before, by what it says of itself (`key` and `body`).

        Raises:
            ApiError: 422, the key is another request's.
        """
        kept = None if once is None else self._kept.get(once["key"])
        if kept is not None and once is not None and kept.body != once["body"]:
            raise ApiError(
                422,
                "This idempotency key was sent with another request; a new request needs a new key.",
                code="idempotency_key_reused",
            )
        return kept

    def begin(self, once: Mapping[str, Any], reader: str, listen: Listen | None) -> KeptAnswer:
        """Keep what the current task generates."""
        task = asyncio.current_task()
        assert task is not None
        kept = KeptAnswer(once["key"], once["body"], task.cancel)
        kept.reader, kept._listen = reader, listen
        self._kept[kept.key] = kept
        return kept

    def finish(self, kept: KeptAnswer) -> None:
        """It is whole: it is kept for a while."""
        kept.finish()
        self._keep_for(kept, ORPHAN_S if kept.reader is None else KEPT_S)
        whole = [each for each in self._kept.values() if each.is_whole]
        for oldest in whole[: max(0, len(whole) - MOST_KEPT)]:
            self._drop(oldest)

    def fail(self, kept: KeptAnswer) -> None:
        """It will not be whole: who asks again asks anew."""
        kept.fail()
        self._drop(kept)

    def gateway_lost(self, endpoint: str) -> None:
        """Keep what a gateway that is gone has asked for, for who asks again."""
        orphans = [kept for kept in self._kept.values() if kept.reader == endpoint]
        for kept in orphans:
            kept.release()
            self._keep_for(kept, ORPHAN_S)
        if orphans:
            self._on_orphans([kept.key for kept in orphans])

    def __len__(self) -> int:
        return len(self._kept)

    def _keep_for(self, kept: KeptAnswer, seconds: float) -> None:
        def over() -> None:
            if kept.reader is not None and not kept.is_whole:
                return  # somebody has asked again
            kept.end()
            self._drop(kept)

        if (timer := self._timers.pop(kept.key, None)) is not None:
            timer.cancel()
        self._timers[kept.key] = asyncio.get_running_loop().call_later(seconds, over)

    def _drop(self, kept: KeptAnswer) -> None:
        if self._kept.get(kept.key) is kept:
            del self._kept[kept.key]
            if (timer := self._timers.pop(kept.key, None)) is not None:
                timer.cancel()
