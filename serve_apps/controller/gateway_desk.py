"""What gateways, and those about them, ask the apps' controller for beside the table."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from serve_apps.controller.gateways import Gateways
from serve_apps.controller.key_file import KeyFile
from serve_apps.controller.orphans import Orphans
from serve_apps.quotas.limit_bank import Drawn, LimitBank
from serve_apps.quotas.place_shares import PlaceShares


class GatewayDesk:
    """Shares out places and limits, hands out keys, and knows where answers are kept whose gateway is gone.

    Args:
        gateways: those that there are.
        keys: where their API keys are, see `KeyFile`.
    """

    def __init__(self, gateways: Gateways, keys: str | None) -> None:
        self._gateways = gateways
        self.keys = KeyFile(keys)
        self._shares = PlaceShares()
        self._bank = LimitBank()
        self._orphans = Orphans()

    def answer(
        self, gateway: str, report: Mapping[str, Any], apps: Collection[str], now: float
    ) -> dict[str, Any]:
        """What a gateway is told whatever the table is: how many `gateways` there are, its `shares` of
        places, by app, whether it is the one whose figures `tells_of_apps`, and `keys` if they are new."""
        answer: dict[str, Any] = {
            "gateways": self._gateways.number_alive(now),
            "tells_of_apps": self._gateways.is_first(gateway, now),
            "shares": {
                app: self._shares.share(app, gateway, in_use=filled, want=want, capacity=capacity)
                for app, (filled, want, capacity) in report["places"].items()
                if app in apps
            },
        }
        keys = self.keys.told(report["keys"])
        return answer if keys is None else {**answer, "keys": keys}

    def urls(self) -> list[str]:
        """Where the gateways are that can be asked."""
        return [url for _, url in self._gateways.places(time.monotonic())]

    def share(self, gateway: str, app: str, filled: int, want: int, capacity: int) -> int:
        """A gateway's share of an app's places, see `PlaceShares.share`."""
        return self._shares.share(app, gateway, in_use=filled, want=want, capacity=capacity)

    async def draw(
        self, gateway: str, method: str, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> Drawn:
        """A gateway draws from the limits of a tenant, see `LimitBank`."""
        if method == "draw_tokens":
            return self._bank.draw_tokens(gateway, *arguments, **named)
        return await self._bank.draw_requests(*arguments, **named)

    def add_orphans(self, application: str, replica: str, keys: Sequence[str]) -> None:
        """A replica keeps answers whose gateway is gone."""
        self._orphans.add(application, replica, keys, time.monotonic())

    async def find_orphan(self, application: str, request: str, wait_s: float) -> dict[int, str]:
        """Where the parts of a request are kept, see `Orphans.find`."""
        return await self._orphans.find(application, request, wait_s)

    def look(self, apps: Collection[str], now: float) -> None:
        """Take back what apps and gateways had that are gone."""
        there = self._gateways.ids(now)
        self._shares.keep_only(apps, there)
        self._bank.keep_only(there)
