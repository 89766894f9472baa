"""A replica's line to the controller of the apps: it says how it is, and is told what to do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.named_actor import NamedActor
from cluster.errors import ShoalError
from serve_apps.spec import CONTROLLER

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Where the controller does not answer."""
ORDER_EVERY_S = 0.1
"""While an order is carried out, whose end somebody waits for."""
ANSWER_TIMEOUT_S = 5.0
LAST_WORD_S = 0.5
"""How long a replica that ends waits for its last word to be heard."""


class ControllerLink:
    """Reports again and again, and carries out one order after the other. The controller keeps a report until
    there is something to do, or half a second. Without a controller nothing happens: the replica goes on as
    it is.

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
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Something is new: it is reported at once."""
        self._changed.set()

    async def tell_end(self) -> None:
        """This replica ends now, and its devices are free; the controller need not find out."""
        with contextlib.suppress(ShoalError, ray.exceptions.RayError, TimeoutError):
            await self._controller.ask("gone", self._application, self._replica, timeout_s=LAST_WORD_S)

    def tell_orphans(self, keys: Sequence[str]) -> None:
        """Say that this replica keeps answers whose gateway is gone."""
        self._controller.tell("desk", "add_orphans", (self._application, self._replica, list(keys)), {})

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            busy = self._order is not None and not self._order.done()
            self._changed.clear()
            report = asyncio.create_task(self._report({**self._describe(), "busy": busy}))
            changed = asyncio.create_task(self._changed.wait())
            # A busy replica is not told what it is doing already, again and again.
            await asyncio.wait({report, changed}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if not report.done():
                report.cancel()  # what it would be told, it is told again
                continue
            order = report.result()
            if order is None:
                continue
            if not busy:
                self._order = asyncio.create_task(self._carry_out(order))
            await asyncio.sleep(ORDER_EVERY_S)

    async def _report(self, facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
        try:
            order: Mapping[str, Any] | None = await self._controller.ask(
                "report", self._application, self._replica, facts, timeout_s=ANSWER_TIMEOUT_S, once=True
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, requests go on being served
            logger.warning("the controller did not take a report: %r", error)
            await asyncio.sleep(RETRY_S)
            return None
        return order

    async def _carry_out(self, order: Mapping[str, Any]) -> None:
        try:
            await self._obey(order)
        except Exception:
            logger.exception("replica %s could not do what it was told: %s", self._replica, order["action"])
        self.tell()
