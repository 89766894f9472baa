"""Several gateways let in as much as one would: what each draws ahead is little, and nothing is lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from serve_apps.quotas import limits_private
from serve_apps.quotas.limit_bank import Drawn, LimitBank
from serve_apps.quotas.shared_limits import BankSilentError, SharedLimits
from serve_apps.quotas.tenant_limits import LimitedError, Limits, OwnLimits, PerMinute
from serve_apps.quotas.token_budget import Admission

TICK_S = 0.05


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(limits_private._STEADY, "time", lambda: self.now)

    def __call__(self) -> float:
        return self.now


class Site:
    """Gateways, and the bank that they share."""

    def __init__(self, clock: Clock, gateways: int) -> None:
        self.clock = clock
        self.bank = LimitBank(clock)
        self.silent = False
        self.asked = 0
        self.gateways = [SharedLimits(self.line(str(number)), clock) for number in range(gateways)]
        for each in self.gateways:
            each.gateways = gateways

    def line(self, gateway: str) -> Callable[..., Awaitable[Drawn]]:
        async def ask(method: str, *arguments: Any, **named: Any) -> Drawn:
            self.asked += 1
            await asyncio.sleep(0)
            if self.silent:
                raise BankSilentError("silent")
            if method == "draw_tokens":
                return self.bank.draw_tokens(gateway, *arguments, **named)
            return await self.bank.draw_requests(*arguments, **named)

        return ask


async def offer(
    limits: list[Limits],
    tell: Callable[[], Awaitable[None]],
    clock: Clock,
    asked: PerMinute,
    seconds: float,
    per_second: float,
    chance: Random,
) -> Counter[str]:
    """Requests at random moments to random gateways, most of them to the first; what was let in and taken.

    Each takes 1 to 100 tokens, is expected to take 50, and lasts up to two seconds."""
    counts: Counter[str] = Counter()
    running: list[tuple[float, Admission, int]] = []
    weights = [4, *([1] * (len(limits) - 1))]
    for tick in range(round(seconds / TICK_S)):
        clock.now += TICK_S
        for _ in range(int(2 * per_second * TICK_S * chance.random() + chance.random())):
            (gateway,) = chance.choices(limits, weights)
            try:
                admission = await gateway.admit("ann", asked, lambda: 50)
            except LimitedError as error:
                counts["refused"] += 1
                counts["with a wait"] += 1 <= error.wait_s <= 120
                continue
            counts["let in"] += 1
            running.append((clock.now + chance.uniform(0, 2), admission, chance.randrange(1, 101)))
        for _, admission, tokens in [each for each in running if each[0] <= clock.now]:
            admission.settle(tokens)
            counts["tokens"] += tokens
        running = [each for each in running if each[0] > clock.now]
        if tick % 10 == 0:
            await tell()
    return counts


async def nothing() -> None:
    pass


@pytest.mark.parametrize("gateways", [2, 3, 8])
@pytest.mark.parametrize(
    ("asked", "per_second"),
    [
        (PerMinute(requests=600), 40),
        (PerMinute(requests=30), 5),
        (PerMinute(tokens=30_000), 40),
        (PerMinute(tokens=3_000), 5),
        (PerMinute(requests=400, tokens=30_000), 40),
    ],
    ids=str,
)
def test_three_minutes_of_too_much_let_in_what_one_gateway_would(
    gateways: int, asked: PerMinute, per_second: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> tuple[Counter[str], Counter[str]]:
        clock = Clock(monkeypatch)
        alone = await offer([OwnLimits(clock)], nothing, clock, asked, 180, per_second, Random(1))
        site = Site(clock, gateways)

        async def tell() -> None:
            for each in site.gateways:
                await each.tell()

        shared = await offer(list(site.gateways), tell, clock, asked, 180, per_second, Random(1))
        print(f"{alone}, {shared}, the bank was asked {site.asked} times")
        return alone, shared

    alone, shared = asyncio.run(go())
    assert alone["refused"] > 100
    assert shared["with a wait"] == shared["refused"]
    # Of requests of random sizes only what is limited is the same: as many tokens are more or fewer requests.
    limited = "tokens" if asked.requests is None else "let in"
    assert shared[limited] == pytest.approx(alone[limited], rel=0.05)


def test_a_small_limit_is_kept_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> list[int]:
        site = Site(Clock(monkeypatch), 3)
        let_in = [0, 0, 0]
        for number in range(60):
            try:
                await site.gateways[number % 3].admit("ann", PerMinute(requests=10), lambda: 1)
                let_in[number % 3] += 1
            except LimitedError:
                pass
        return let_in

    assert sum(asyncio.run(go())) == 10


def test_a_burst_through_one_gateway_gets_all_that_the_limit_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> tuple[int, int]:
        site = Site(Clock(monkeypatch), 4)
        await site.gateways[1].admit("ann", PerMinute(requests=1000), lambda: 1)  # draws ahead, and is idle

        async def ask() -> bool:
            try:
                await site.gateways[0].admit("ann", PerMinute(requests=1000), lambda: 1)
            except LimitedError:
                return False
            return True

        answers = await asyncio.gather(*(ask() for _ in range(1500)))
        return sum(answers), site.asked

    let_in, asked = asyncio.run(go())
    assert 1000 - 1000 // 20 <= let_in <= 1000
    assert asked < 150, "one call of the bank is for many requests"


def test_tokens_that_are_not_needed_go_back_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        clock = Clock(monkeypatch)
        site = Site(clock, 2)
        one, other = site.gateways
        limit = PerMinute(tokens=1000)
        admission = await one.admit("ann", limit, lambda: 900)
        await other.admit("ann", limit, lambda: 200)
        with pytest.raises(LimitedError):
            await other.admit("ann", limit, lambda: 200)
        admission.settle(10)
        await one.tell()
        clock.now += 1
        for _ in range(3):
            await other.admit("ann", limit, lambda: 200)

    asyncio.run(go())


def test_what_a_gateway_held_that_is_gone_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        clock = Clock(monkeypatch)
        site = Site(clock, 2)
        limit = PerMinute(tokens=1000)
        await site.gateways[0].admit("ann", limit, lambda: 2000)
        with pytest.raises(LimitedError):
            await site.gateways[1].admit("ann", limit, lambda: 10)
        site.bank.keep_only({"1"})
        clock.now += 1
        await site.gateways[1].admit("ann", limit, lambda: 10)

    asyncio.run(go())


def test_while_the_bank_is_silent_each_lets_in_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> tuple[int, int]:
        site = Site(Clock(monkeypatch), 3)
        site.silent = True
        let_in = 0
        for gateway in site.gateways:
            for _ in range(100):
                try:
                    await gateway.admit("ann", PerMinute(requests=60, tokens=10**6), lambda: 1)
                    let_in += 1
                except LimitedError:
                    pass
        return let_in, site.asked

    assert asyncio.run(go()) == (60, 3)


def test_a_bank_that_comes_back_goes_by_what_gateways_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        clock = Clock(monkeypatch)
        site = Site(clock, 2)
        limit = PerMinute(tokens=1000)
        admission = await site.gateways[0].admit("ann", limit, lambda: 980)
        site.bank = LimitBank(clock)
        await site.gateways[0].tell()
        admission.settle(500)
        await site.gateways[0].tell()
        assert site.bank._budgets.find("ann", 1000)._left_now() == 500

    asyncio.run(go())


def test_who_asks_no_more_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        clock = Clock(monkeypatch)
        site = Site(clock, 2)
        gateway = site.gateways[0]
        for number in range(100):
            limit = PerMinute(requests=10, tokens=1000)
            (await gateway.admit(f"tenant-{number}", limit, lambda: 10)).settle(5)
        clock.now += 11
        await gateway.tell()
        await gateway.tell()
        assert (len(gateway._requests), len(gateway._tokens)) == (0, 0)
        # What it took is counted once, also when it begins again.
        await gateway.admit("tenant-1", PerMinute(tokens=1000), lambda: 10)
        assert site.bank._budgets.find("tenant-1", 1000)._left_now() == 995

    asyncio.run(go())
