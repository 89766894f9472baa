"""What has arrived of one request's answer and was not read yet: several tokens become one bundle."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Item = Mapping[str, Any]
"""What an answer gains: `text`, `token_ids`, maybe `logprobs`, `reasoning` (a text) and `calls` (see
`CallPiece`). Numbers: `reasoning_tokens`; `lead_tokens`, at the beginning, before the answer; `call_tokens`,
at the end, from the first call on; `text_after_calls`, characters at the end of the text that came after it.
The first has `start`, `cached_tokens` and maybe `prompt`, the last has `finish_reason`, and `stop_string`
where one ended the text. See `Replica.generate`."""
_COUNTS = ("reasoning_tokens", "lead_tokens", "call_tokens", "text_after_calls")


def merge(items: Sequence[Item]) -> Item:
    """Consecutive items of one answer as one."""
    if len(items) == 1:
        return items[0]
    merged: dict[str, Any] = {
        "text": "".join(item["text"] for item in items),
        "token_ids": [token for item in items for token in item["token_ids"]],
    }
    for name in ("logprobs", "calls"):
        if any(name in item for item in items):
            merged[name] = [entry for item in items for entry in item.get(name, ())]
    if any("reasoning" in item for item in items):
        merged["reasoning"] = "".join(item.get("reasoning", "") for item in items)
    for name in _COUNTS:
        if any(name in item for item in items):
            merged[name] = sum(item.get(name, 0) for item in items)
    first = (("start", items[0]), ("cached_tokens", items[0]), ("prompt", items[0]))
    for name, item in (*first, ("finish_reason", items[-1]), ("stop_string", items[-1])):
        if name in item:
            merged[name] = item[name]
    return merged


class Inbox:
    """Takes items as fast as they come and gives them on in bundles.

    The first bundle goes at once, and so does the last; between them one goes when `interval_s()` seconds
    have passed since the one before.
    """

    def __init__(self, interval_s: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._items: list[Item] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        """Nothing is worth waiting for any more: the last item is here, or none will come."""
        self._next_at = 0.0

    def put(self, item: Item) -> None:
        """Take one item."""
        self._items.append(item)
        self._changed.set()
        if item.get("finish_reason") is not None:
            self._over.set()

    def fail(self, error: Exception) -> None:
        """After what has arrived, reading raises this error; what comes after the last item is no failure."""
        if not self._over.is_set():
            self._error = error
            self._over.set()
            self._changed.set()

    async def ended(self) -> None:
        """Return when the last item is here, or none will come."""
        await self._over.wait()

    async def get(self) -> Item:
        """The next bundle.

        Raises:
            Exception: what `fail` was given.
        """
        loop = asyncio.get_running_loop()
        await self._changed.wait()
        wait_s = self._next_at - loop.time()
        if wait_s > 0 and not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._over.wait()
        if self._items:
            bundle, self._items = self._items, []
            if self._error is None:
                self._changed.clear()
            self._next_at = loop.time() + self._interval_s()
            return merge(bundle)
        assert self._error is not None
        raise self._error
