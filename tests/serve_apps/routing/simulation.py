"""Replicas and requests in simulated time, to see what a routing policy does to them."""

from __future__ import annotations

import heapq
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serve_apps.routing.policy import Policy

PREFILL_S = 0.05
"""What a prompt takes that the replica has not read before."""


@dataclass
class Server:
    """A replica that works on so many requests at once, and takes no more."""

    speed: float = 1.0
    places: int = 4
    running: int = 0
    read: set[str] = field(default_factory=set)
    """Beginnings of prompts that it has cached."""


@dataclass(frozen=True)
class Result:
    """Seconds from arrival to start and to end, by request; and who took how many."""

    starts: list[float]
    ends: list[float]
    taken: list[int]
    read: list[int]
    """Prompts whose beginning the replica had not read before, one entry each."""

    @property
    def p50(self) -> float:
        return statistics.median(self.ends)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.ends, n=100)[98]


def heavy_tailed(chance: random.Random) -> float:
    """Work of an answer in seconds on a replica of speed 1: mostly short, now and then very long."""
    return min(5.0, 0.1 * chance.paretovariate(1.5))


def simulate(
    make: Callable[[random.Random], Policy[int]],
    speeds: Sequence[float],
    *,
    load: float,
    requests: int = 4000,
    groups: int = 0,
    gateways: int = 1,
    common: str = "",
    seed: int = 1,
) -> Result:
    """Poisson arrivals at `load` of what all replicas together can do.

    As in Serve, what no replica has room for waits at the router, in its order, and is ordered anew whenever
    it is tried again.

    Args:
        groups: kinds of prompts, each with a beginning of its own; 0: no two alike.
        gateways: each with a router of its own, which requests come to in turn.
        common: how all prompts begin.
    """
    chance = random.Random(seed)
    policies = [make(random.Random(seed + 1 + number)) for number in range(gateways)]
    servers = [Server(speed) for speed in speeds]
    work = [heavy_tailed(chance) for _ in range(requests)]
    mean = statistics.mean(work) + PREFILL_S
    rate = load * sum(s.speed * s.places for s in servers) / mean
    arrived: dict[str, float] = {}
    result = Result([], [], [0] * len(servers), [])
    events: list[tuple[float, int, str, int]] = []
    now = 0.0
    for number in range(requests):
        now += chance.expovariate(rate)
        heapq.heappush(events, (now, number, "arrives", -1))
    prompts = [chance.randrange(groups) if groups else number for number in range(requests)]

    def start(server: Server, at: int, number: int, now: float) -> None:
        server.running += 1
        result.starts.append(now - arrived[str(number)])
        prompt = str(prompts[number])
        seconds = work[number]
        if prompt not in server.read:
            server.read.add(prompt)
            result.read.append(number)
            seconds += PREFILL_S
        heapq.heappush(events, (now + seconds / server.speed, number, "ends", at))

    waiting: deque[int] = deque()

    def try_first(now: float) -> bool:
        """Route the request that waits for longest; False: no replica has room."""
        number = waiting[0]
        prompt = common + f"{prompts[number]:>8}" * 16
        policy = policies[number % gateways]
        for at in policy.order(range(len(servers)), prompt):
            if servers[at].running < servers[at].places:
                policy.sent(at)
                policy.routed(at, str(number), now, prompt)
                result.taken[at] += 1
                start(servers[at], at, waiting.popleft(), now)
                return True
        return False

    while events:
        now, number, what, at = heapq.heappop(events)
        if what == "arrives":
            arrived[str(number)] = now
            waiting.append(number)
        else:
            servers[at].running -= 1
            policies[number % gateways].completed(at, str(number), now)
            result.ends.append(now - arrived[str(number)])
        while waiting and try_first(now):
            pass
    return result
