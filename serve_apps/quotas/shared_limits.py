"""The limits of tenants that several gateways share: each draws ahead from one bank, a little at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from serve_apps.quotas.limit_bank import Drawn
from serve_apps.quotas.tenant_limits import LimitedError, OwnLimits, PerMinute
from serve_apps.quotas.token_budget import RECOUNT_S, Admission

PART = 20
"""What all gateways together have drawn ahead and not used is one part in so many of a limit, at most."""
PERMIT_S = 10.0
"""How long a request that was drawn ahead may be passed on."""
REFUSED_S = 0.25
"""How long a refusal of the bank's stands for all that ask meanwhile."""
SILENT_S = 1.0
"""How long a bank that did not answer is not asked again."""

Ask = Callable[..., Awaitable[Drawn]]
"""Calls a method of the bank by its name."""


class BankSilentError(Exception):
    """The bank does not answer."""


class SharedLimits:
    """Those of a gateway beside others; see Limits. While the bank does not answer each lets in its part.

    Args:
        ask: calls the bank; raises BankSilentError.
        clock: in seconds, goes only forward.
    """

    def __init__(self, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self.gateways = 1
        """How many there are."""
        self._ask = ask
        self._clock = clock
        self._requests: dict[tuple[str, int], _RequestShare] = {}
        self._tokens: dict[tuple[str, int], _TokenShare] = {}
        """Both by tenant and limit."""
        self._own = OwnLimits(clock)
        self._silent_until = 0.0

    async def admit(self, tenant: str, limits: PerMinute, expected: Callable[[], int]) -> Admission:
        if self._clock() >= self._silent_until:
            try:
                return await self._admit(tenant, limits, expected)
            except BankSilentError:
                self._silent_until = self._clock() + SILENT_S
        return await self._own.admit(tenant, self._part_of(limits), expected)

    async def _admit(self, tenant: str, limits: PerMinute, expected: Callable[[], int]) -> Admission:
        admission = Admission()
        if limits.tokens is not None:
            key = tenant, limits.tokens
            if key not in self._tokens:
                self._tokens[key] = _TokenShare(self._ask, *key, self._clock)
            admission = await self._tokens[key].admit(max(1, expected()), self._ahead(limits.tokens))
        if limits.requests is not None:
            key = tenant, limits.requests
            share = self._requests.setdefault(key, _RequestShare(self._ask, *key, self._clock))
            try:
                await share.take(self._ahead(limits.requests))
            except BaseException:
                admission.settle(0)
                raise
        return admission

    async def tell(self) -> None:
        """Tell the bank what was taken, and give back what is not needed now.

        Raises:
            BankSilentError: it will be told again.
        """
        for key, share in list(self._tokens.items()):
            await share.tell(self._ahead(key[1]))
            if share.is_unused:
                del self._tokens[key]
        now = self._clock()
        for key in [key for key, share in self._requests.items() if share.is_unused(now)]:
            del self._requests[key]

    def _ahead(self, per_minute: int) -> int:
        return max(1, per_minute // (PART * max(1, self.gateways)))

    def _part_of(self, limits: PerMinute) -> PerMinute:
        def part(limit: int | None) -> int | None:
            return None if limit is None else max(1, limit // max(1, self.gateways))

        return PerMinute(part(limits.requests), part(limits.tokens))


class _Refusals:
    """What the bank has refused a moment ago is refused without asking it."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what = what
        self._clock = clock
        self._until = 0.0
        self._wait_s = 0

    def check(self) -> None:
        if self._clock() < self._until:
            raise LimitedError(self._what, self._wait_s)

    def refuse(self, wait_s: int) -> LimitedError:
        self._until, self._wait_s = self._clock() + REFUSED_S, wait_s
        return LimitedError(self._what, wait_s)


class _RequestShare:
    """Requests of one tenant that were drawn and not passed on yet."""

    def __init__(self, ask: Ask, tenant: str, per_minute: int, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._key = tenant, per_minute
        self._clock = clock
        self._left = 0
        self._until = 0.0
        self._lock = asyncio.Lock()
        self._refusals = _Refusals(f"{per_minute} requests", clock)

    async def take(self, ahead: int) -> None:
        async with self._lock:
            if not self._left or self._clock() >= self._until:
                self._refusals.check()
                drawn = await self._ask("draw_requests", *self._key, ahead)
                if not drawn["granted"]:
                    raise self._refusals.refuse(drawn["wait_s"])
                self._left, self._until = drawn["granted"], self._clock() + PERMIT_S
            self._left -= 1

    def is_unused(self, now: float) -> bool:
        return now >= self._until and not self._lock.locked()


class _TokenShare:
    """Tokens of one tenant: those that this gateway has drawn, less those that were taken."""

    def __init__(self, ask: Ask, tenant: str, per_minute: int, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._key = tenant, per_minute
        self._clock = clock
        self._left = 0
        """Below 0: more was taken than drawn, which the bank has been told, or will be."""
        self._reserved = 0
        """Of all that run, as of `_counted_at`."""
        self._taken = 0
        self._told: tuple[int, int] = (0, 0)
        """What the bank knows to be held and taken."""
        self._running: set[Admission] = set()
        self._counted_at = clock()
        self._lock = asyncio.Lock()
        self._refusals = _Refusals(f"{per_minute} tokens", clock)

    @property
    def is_unused(self) -> bool:
        """Whether a new one would be the same, and the bank knows all of this one."""
        return not self._running and self._told == (0, self._taken) and not self._lock.locked()

    async def admit(self, expected: int, ahead: int) -> Admission:
        async with self._lock:
            self._recount()
            free = self._left - self._reserved
            if free < expected:
                self._refusals.check()
                drawn = await self._draw(max(expected - free, ahead), ahead)
                if not drawn["granted"]:
                    raise self._refusals.refuse(drawn["wait_s"])
            admission = Admission(self, expected)
            self._running.add(admission)
            self._reserved += expected
            return admission

    def end(self, admission: Admission, tokens: int) -> None:
        """A request has ended; see `Admission.settle`."""
        self._running.discard(admission)
        self._reserved -= admission.held
        self._left -= tokens
        self._taken += tokens

    async def tell(self, ahead: int) -> None:
        async with self._lock:
            self._recount()
            # Nobody runs: all goes back.
            spare = ahead if self._running else 0
            if self._told != (self._held(spare), self._taken):
                await self._draw(0, spare)

    async def _draw(self, want: int, spare: int) -> Drawn:
        held, taken = self._held(spare), self._taken
        drawn = await self._ask(
            "draw_tokens", *self._key, want=want, held=held, taken=taken, told=self._told[1]
        )
        # What has ended meanwhile was held, and will be told as taken.
        self._left = held - (self._taken - taken) + drawn["granted"]
        self._told = held + drawn["granted"], taken
        return drawn

    def _held(self, spare: int) -> int:
        return max(self._reserved, min(self._left, self._reserved + spare))

    def _recount(self) -> None:
        if self._clock() - self._counted_at >= RECOUNT_S:
            self._counted_at = self._clock()
            for admission in self._running:
                held = max(admission.expected, admission.taken())
                self._reserved += held - admission.held
                admission.held = held
