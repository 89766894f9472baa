"""The limits of tenants over several gateways: what each gateway draws is counted here before it is used."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypedDict

from serve_apps.quotas.tenant_limits import RequestWindows
from serve_apps.quotas.token_budget import Admission, TokenBudget, TokenBudgets


class Drawn(TypedDict):
    """What a gateway may use; 0: nothing, and it is worth to ask again after `wait_s` seconds."""

    granted: int
    wait_s: int


@dataclass
class _Account:
    """What one gateway has of a tenant's tokens."""

    taken: int
    held: Admission | None = None


class LimitBank:
    """Counts what is drawn; of requests it is used up by that, of tokens it is held until it is said what was
    taken.

    A bank that is new counts from nothing, and takes what gateways held before as they tell it.

    Args:
        clock: in seconds, goes only forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = RequestWindows()
        self._budgets = TokenBudgets(clock)
        self._accounts: dict[tuple[str, str, int], _Account] = {}
        """By gateway, tenant and limit."""

    async def draw_requests(self, tenant: str, per_minute: int, want: int) -> Drawn:
        """Let a gateway pass so many requests on, or as many as the limit lets."""
        granted = await self._requests.take(tenant, per_minute, want)
        wait_s = 0 if granted else await self._requests.wait_s(tenant, per_minute)
        return {"granted": granted, "wait_s": wait_s}

    def draw_tokens(
        self, gateway: str, tenant: str, per_minute: int, *, want: int, held: int, taken: int, told: int
    ) -> Drawn:
        """Take in what a gateway has of a tenant's tokens, and let it have more.

        Args:
            want: so many more; all of them are granted, or none.
            held: what it has not used, and gives back later, or uses.
            taken: all that was used there, since it first asked.
            told: what it said of that the last time, perhaps to a bank before this one.
        """
        budget = self._budgets.find(tenant, per_minute)
        account = self._accounts.setdefault((gateway, tenant, per_minute), _Account(told))
        # One that has forgotten about the tenant begins again with 0.
        self._end(budget, account, taken - account.taken if taken >= account.taken else taken)
        account.taken = taken
        granted = want if want and budget.has_room(beside=held) else 0
        if held + granted:
            account.held = budget.hold(held + granted)
        return {"granted": granted, "wait_s": budget.wait_s() if want and not granted else 0}

    def keep_only(self, gateways: Collection[str]) -> None:
        """Take back what gateways held that are gone."""
        for key in [key for key in self._accounts if key[0] not in gateways]:
            held = self._accounts.pop(key).held
            if held is not None:
                held.settle(0)

    def _end(self, budget: TokenBudget, account: _Account, tokens: int) -> None:
        held, account.held = account.held or budget.hold(0), None
        held.settle(tokens)
