"""A replica's line to the controller of the apps: it says how it is, and is told what to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cluster.actors import NAMESPACE
from cluster.actors.named_actor import NamedActor
from serve_apps.spec import CONTROLLER

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 0.5
ORDER_EVERY_S = 0.1
"""While an order is carried out, whose end somebody waits for."""
ANSWER_TIMEOUT_S = 5.0


class ControllerLink:
    """Reports several times a second and carries out one order after the other. Without a controller nothing
    happens: the replica goes on as it is.

    Args:
        describe: what is reported.
        obey: carries out an order, see `App.order`.
    """

    def __init__(
        self,
        application: str,
        replica: str,
        describe: Callable[[], Mapping[str, Any]],
        obey: Callable[[Mapping[str, Any]], Awaitable[None]],
    ) -> None:
        self._application = application
        self._replica = replica
        self._describe = describe
        self._obey = obey
        self._controller = NamedActor(CONTROLLER, NAMESPACE)
        self._order: asyncio.Task[None] | None = None

    async def spec(self) -> dict[str, Any] | None:
        """What this replica is to serve now, where that is not what it was made for any more."""
        try:
            answer: dict[str, Any] | None = await self._controller.ask(
                "spec_of", self._application, timeout_s=ANSWER_TIMEOUT_S
            )
        except Exception as error:  # noqa: BLE001 - it was made for something; the controller can correct it
            logger.warning("no controller, serving what this replica was made for: %r", error)
            return None
        return answer

    def tell_orphans(self, keys: Sequence[str]) -> None:
        """Say that this replica keeps answers whose gateway is gone."""
        self._controller.tell("desk", "add_orphans", (self._application, self._replica, list(keys)), {})

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            try:
                facts = {**self._describe(), "busy": self._order is not None and not self._order.done()}
                order = await self._controller.ask(
                    "report", self._application, self._replica, facts, timeout_s=ANSWER_TIMEOUT_S
                )
                if order is not None and (self._order is None or self._order.done()):
                    self._order = asyncio.create_task(self._carry_out(order))
            except Exception as error:  # noqa: BLE001 - whatever it is, requests go on being served
                logger.warning("the controller did not take a report: %r", error)
            busy = self._order is not None
            if self._order is not None and self._order.done():
                self._order = None
            await asyncio.sleep(ORDER_EVERY_S if busy else REPORT_EVERY_S)

    async def _carry_out(self, order: Mapping[str, Any]) -> None:
        try:
            await self._obey(order)
        except Exception:
            logger.exception("replica %s could not do what it was told: %s", self._replica, order["action"])
