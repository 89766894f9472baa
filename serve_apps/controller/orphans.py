"""Answers whose gateway is gone, and which replica keeps them for who asks again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from serve_apps.replica.kept_answers import ORPHAN_S, parts_of


class Orphans:
    """By application and request. Times are of a steady clock."""

    def __init__(self) -> None:
        self._homes: dict[tuple[str, str], dict[int, str]] = {}
        self._until: dict[tuple[str, str], float] = {}
        self._changed = asyncio.Event()

    def add(self, application: str, replica: str, keys: Sequence[str], now: float) -> None:
        """A replica keeps these parts."""
        for place in [place for place, until in self._until.items() if until <= now]:
            del self._homes[place], self._until[place]
        for key in keys:
            request, part = parts_of(key)
            self._homes.setdefault((application, request), {})[part] = replica
            self._until[application, request] = now + ORPHAN_S
        self._changed.set()
        self._changed = asyncio.Event()

    async def find(self, application: str, request: str, wait_s: float) -> dict[int, str]:
        """The replica of each part of a request that is kept.

        Args:
            wait_s: replicas may be about to say so: how long to wait for that.
        """
        try:
            async with asyncio.timeout(wait_s):
                while (application, request) not in self._homes:
                    await self._changed.wait()
        except TimeoutError:
            return {}
        return dict(self._homes[application, request])
