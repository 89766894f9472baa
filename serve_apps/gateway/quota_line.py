"""The gateway's line to who shares out places and limits among gateways: the apps' controller."""

from __future__ import annotations

from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.named_actor import NamedActor
from cluster.errors import ShoalError
from serve_apps.quotas.limit_bank import Drawn
from serve_apps.quotas.shared_limits import BankSilentError
from serve_apps.spec import CONTROLLER

ANSWER_TIMEOUT_S = 0.5
"""A request waits for it."""


class QuotaLine:
    """Asks the controller in the name of one gateway."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._controller = NamedActor(CONTROLLER, NAMESPACE)

    async def share(self, app: str, filled: int, want: int, capacity: int) -> int | None:
        """See AskShare."""
        try:
            share = await self._ask("share", self._gateway_id, app, filled, want, capacity)
        except BankSilentError:
            return None
        return None if share is None else int(share)

    async def draw(self, method: str, tenant: str, per_minute: int, *more: Any, **named: Any) -> Drawn:
        """Call a method of the LimitBank.

        Raises:
            BankSilentError: the controller does not answer.
        """
        drawn: Drawn = await self._ask("draw", self._gateway_id, method, (tenant, per_minute, *more), named)
        return drawn

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._controller.ask("desk", method, arguments, {}, timeout_s=ANSWER_TIMEOUT_S)
        except (ShoalError, ray.exceptions.RayError, TimeoutError) as error:
            raise BankSilentError(str(error)) from error
