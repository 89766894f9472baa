"""How many replicas the load asks for: pure arithmetic, with the clock passed in."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.config.sections.serve import AutoscaleConfig

FIRST_TOKEN_WINDOW_S = 15.0
"""The time to first token is judged by the requests of this long."""
FEWEST_FIRST_TOKENS = 5
"""Of fewer requests it is not judged."""
MOST_AT_ONCE = 2.0
"""A time to first token that is far too long asks for at most this many times as many replicas."""


@dataclass(frozen=True)
class Load:
    """What an app's replicas and its gateway carry at one moment."""

    ongoing: float = 0.0
    """Requests that run or wait."""
    mean_ongoing: float | None = None
    """Those on average over the last `look_back_period_s`; None: not known."""
    places: int = 0
    """Requests that the replicas that are ready can run at once."""
    waiting: float = 0.0
    """Those of them that wait, at the gateway or in a replica."""
    cache_use: float = 0.0
    """Part of the KV cache that requests hold, on average over the replicas."""
    first_token_s: float | None = None
    """95 of 100 requests had their first token within this; None where there were too few."""
    replicas: int = 0
    """Replicas that are ready."""


def asked(load: Load, targets: AutoscaleConfig) -> int:
    """The replicas with which every target would be met."""
    asks = [_asked_by_ongoing(load, targets.target_ongoing_requests)]
    if targets.target_queue_length is not None:
        asks.append(math.ceil(load.waiting / targets.target_queue_length))
    if targets.target_kv_cache_use is not None:
        asks.append(math.ceil(load.replicas * load.cache_use / targets.target_kv_cache_use - 1e-9))
    if targets.target_first_token_s is not None and load.first_token_s is not None and load.ongoing > 0:
        ratio = min(MOST_AT_ONCE, load.first_token_s / targets.target_first_token_s)
        # Fewer replicas make it longer: with more than half of it used up, none is given away.
        asks.append(math.ceil(load.replicas * (max(1.0, ratio) if ratio > 0.5 else 0.5)))
    return max(asks)


def _asked_by_ongoing(load: Load, target: float) -> int:
    # Where replicas are full, whoever comes next waits: the mean would say so too late.
    full = load.ongoing >= load.places
    counted = load.ongoing if full or load.mean_ongoing is None else load.mean_ongoing
    ask = math.ceil(counted / target)
    # Whether there is to be any depends on whether anybody is there.
    return ask if ask > 1 else min(1, math.ceil(load.ongoing))


@dataclass
class Wants:
    """From load and time to replicas.

    The want rises when the load has asked for more during the whole of `upscale_delay_s`, to the least
    that was asked for meanwhile; it falls, likewise, to the most asked for during `downscale_delay_s`, and
    to none only after `idle_s`.
    """

    want: int = 0
    _since: float | None = field(default=None, repr=False)
    _side: int = field(default=0, repr=False)
    _bound: int = field(default=0, repr=False)

    def update(self, ask: int, fewest: int, most: int, targets: AutoscaleConfig, now: float) -> int:
        """The replicas wanted at `now` (seconds) when the load asks for `ask`."""
        ask = max(fewest, min(most, ask))
        self.want = max(fewest, min(most, self.want))
        if self.want == 0 and ask > 0:
            # Somebody waits for the first replica.
            self.want, self._side = ask, 0
            return self.want
        side = (ask > self.want) - (ask < self.want)
        if side == 0 or side != self._side:
            self._side, self._since, self._bound = side, now, ask
        self._bound = min(self._bound, ask) if side > 0 else max(self._bound, ask)
        delay_s = targets.upscale_delay_s if side > 0 else targets.downscale_delay_s
        # Sums, as of who looks again at since + delay: a difference may be rounded to less.
        if side and self._since is not None and now >= self._since + delay_s:
            if self._bound == 0 and now < self._since + targets.idle_s:
                self.want = 1
            else:
                self.want = self._bound
                self._side, self._since = 0, None
        return self.want


class OngoingMean:
    """How many requests were in flight in the last seconds, on average over time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=50_000)

    def add(self, ongoing: float, window_s: float, now: float) -> float:
        """The mean of the last `window_s` seconds, or of as many as were looked at; each number counts for as
        long as it was the last one seen."""
        self._seen.append((now, ongoing))
        since = now - window_s
        while len(self._seen) > 1 and self._seen[1][0] <= since:
            self._seen.popleft()
        total = sum(
            number * (until - max(begun, since)) for (begun, number), (until, _) in pairwise(self._seen)
        )
        span = now - max(since, self._seen[0][0])
        return total / span if span > 0 else ongoing


class FirstTokens:
    """The times to first token of the last seconds."""

    def __init__(self, window_s: float = FIRST_TOKEN_WINDOW_S) -> None:
        self._window_s = window_s
        self._seconds: deque[tuple[float, float]] = deque(maxlen=10_000)

    def add(self, seconds: list[float], now: float) -> None:
        self._seconds.extend((now, each) for each in seconds)

    def percentile95(self, now: float) -> float | None:
        """Within how many seconds 95 of 100 had it; None where there were too few."""
        while self._seconds and now - self._seconds[0][0] > self._window_s:
            self._seconds.popleft()
        if len(self._seconds) < FEWEST_FIRST_TOKENS:
            return None
        ordered = sorted(each for _, each in self._seconds)
        return ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]
