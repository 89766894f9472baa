"""The table of the apps that gateways are told, under a number that changes with it; no Ray."""

from __future__ import annotations

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
        return self.number
