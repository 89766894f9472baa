"""Where replicas say how they are, and are told what to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from serve_apps.controller.app import App
from serve_apps.controller.gateways import Gateways

HOLD_S = 0.5
"""How long a replica that says how it is may wait for something to do."""


class ReplicaDesk:
    """Hears replicas, and keeps their reports until there is something for them to do.

    Args:
        apps: by name; they come and go.
        on_change: called when a replica is in another state than before.
        on_event: told what has happened to an app: its kind, and what there is to say of it.
    """

    def __init__(
        self,
        apps: Mapping[str, App],
        gateways: Gateways,
        on_change: Callable[[], None],
        on_event: Callable[[App, str, dict[str, Any]], None],
    ) -> None:
        self._apps = apps
        self._gateways = gateways
        self._on_change = on_change
        self._on_event = on_event
        self._ordered = asyncio.Event()
        """Set, and replaced, when there may be something to do."""

    def call(self) -> None:
        """Who waits for something to do looks again."""
        self._ordered.set()
        self._ordered = asyncio.Event()

    def app_of(self, application: str) -> App | None:
        """The app that a Serve application is of."""
        apps = self._apps.values()
        return next((a for a in apps if any(r.application == application for r in a.record.revisions)), None)

    async def report(self, application: str, replica: str, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        """A replica says how it is, and is told what to do: an order, see `App.order`; None: nothing came up
        for a while."""
        app = self.app_of(application)
        if app is None:
            await asyncio.sleep(HOLD_S)
            return None
        before = app.replicas.said(application, time.monotonic()).get(replica, {}).get("state")
        new = app.hear(application, replica, facts, time.monotonic())
        if new is not None:
            self._on_event(app, *new)
        if facts["state"] != before:
            self._on_change()
        return await self._order_for(app, application, replica, facts)

    async def _order_for(
        self, app: App, application: str, replica: str, facts: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Wait for something to do for a replica, though not for long."""

        def all_know(number: int) -> bool:
            return self._gateways.all_know(number, time.monotonic())

        try:
            async with asyncio.timeout(HOLD_S):
                while (order := app.order(application, replica, facts, all_know)) is None:
                    await self._ordered.wait()
        except TimeoutError:
            return None
        return order

    def gone(self, application: str, replica: str) -> None:
        """A replica ends, and has nothing any more: it says so itself."""
        app = self.app_of(application)
        if app is not None:
            app.replicas.forget(application, replica)
            app.engines.gone.add((application, replica))
            self._on_change()
