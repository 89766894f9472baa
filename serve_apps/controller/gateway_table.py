"""The table of the apps that gateways are told, under a number that changes with it; no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

LEFT: dict[str, Any] = {"versions": [], "applications": [], "wanted": 0, "granted": 0, "leaves": True}
"""An app that goes with its cluster, and may come back with it."""


class GatewayTable:
    """What they were told last.

    Args:
        number: higher than any that was given out before.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.apps: dict[str, Any] = {}
        self._leaving: set[str] = set()
        self._changed = asyncio.Event()

    def leave(self, names: set[str]) -> None:
        """These apps go since the cluster ends: gateways know their names to the end, so that whoever asks is
        told to come again, and not that there is no such model."""
        self._leaving |= names

    def publish(self, apps: Mapping[str, Any]) -> int:
        """Have these be told, by name; the number under which they are."""
        told = {**dict.fromkeys(self._leaving, LEFT), **apps}
        if told != self.apps:
            self.apps = told
            self.number += 1
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
        return self.number

    async def news(self, seen: int, hold_s: float) -> bool:
        """Wait, at the longest for so many seconds, until there is another table than one of this number;
        whether there is."""
        try:
            async with asyncio.timeout(hold_s):
                while self.number == seen:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
