"""What tenants may ask for in a minute, counted where all of their requests come by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from serve_apps.quotas.limits_private import count_by_the_steady_clock
from serve_apps.quotas.token_budget import Admission, TokenBudgets

MINUTE_S = 60


class LimitedError(Exception):
    """A tenant has asked too much.

    Attributes:
        what: the limit, as people say it: a number and what it counts.
        wait_s: when it is worth to try again.
    """

    def __init__(self, what: str, wait_s: int) -> None:
        super().__init__(f"{what} a minute; try again in {wait_s} s")
        self.what = what
        self.wait_s = wait_s


@dataclass(frozen=True)
class PerMinute:
    """The limits of a tenant; None: none."""

    requests: int | None = None
    tokens: int | None = None


class Limits(Protocol):
    """Lets requests in, or says why not."""

    async def admit(self, tenant: str, limits: PerMinute, expected: Callable[[], int]) -> Admission:
        """Count one request of a tenant, and keep room for the tokens that it may take.

        Args:
            expected: reckons about how many it may take; asked only where tokens are limited.

        Raises:
            LimitedError: the tenant has asked too much.
        """


class RequestWindows:
    """Requests within the last 60 seconds; of the minute before this one, what was counted is taken as spread
    evenly over it. Two counters for each tenant and limit, however much is counted."""

    def __init__(self) -> None:
        count_by_the_steady_clock()
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())

    async def take(self, tenant: str, per_minute: int, most: int = 1) -> int:
        """Count as many requests as the limit lets, at most so many; how many that were."""
        limit = RateLimitItemPerMinute(per_minute, namespace="requests")
        if most > 1:
            most = min(most, max(1, (await self._limiter.get_window_stats(limit, tenant)).remaining))
        return most if await self._limiter.hit(limit, tenant, cost=most) else 0

    async def wait_s(self, tenant: str, per_minute: int) -> int:
        """After how many seconds it is worth to try again."""
        limit = RateLimitItemPerMinute(per_minute, namespace="requests")
        reset = (await self._limiter.get_window_stats(limit, tenant)).reset_time
        return min(MINUTE_S, max(1, math.ceil(reset - time.monotonic())))


class OwnLimits:
    """Those of a gateway that is the only one; see Limits. Tokens are budgets, see `TokenBudget`: what a
    request takes is known only when it has been taken.

    Args:
        clock: in seconds, goes only forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = RequestWindows()
        self._budgets = TokenBudgets(clock)

    async def admit(self, tenant: str, limits: PerMinute, expected: Callable[[], int]) -> Admission:
        admission = Admission()
        if limits.tokens is not None:
            budget = self._budgets.find(tenant, limits.tokens)
            admitted = budget.admit(expected())
            if admitted is None:
                raise LimitedError(f"{limits.tokens} tokens", budget.wait_s())
            admission = admitted
        if limits.requests is not None and not await self._requests.take(tenant, limits.requests):
            admission.settle(0)
            wait_s = await self._requests.wait_s(tenant, limits.requests)
            raise LimitedError(f"{limits.requests} requests", wait_s)
        return admission
