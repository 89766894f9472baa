"""Loads that come by themselves, whoever can answer them: when each request is due. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from infra.lab.simulator.daily_load import DAY_S, Curve

QUIET = 0.3
"""Of the top: what comes between bursts, and at the bottom of a day."""
BURST_S = 40.0
"""How long a burst lasts, on average."""
BURST_EVERY_S = 120.0
"""From one to the next, on average."""
BURST_SPEED = 60.0


@dataclass(frozen=True)
class LoadShape:
    """Requests that arrive at random, at a rate that changes.

    Attributes:
        curve: the rates, over a day.
        speed: seconds of the curve that pass in one.
        lasts_s: how long it goes on.
    """

    curve: Curve
    speed: float
    lasts_s: float

    def rates(self, seed: int) -> Iterator[tuple[float, float, float]]:
        """From when on it comes at which rate for how long: seconds, requests a second, seconds."""
        for moment, rate in self.curve.steps(seed):
            since = moment / self.speed
            if since >= self.lasts_s:
                return
            yield since, rate, min(self.curve.step_s / self.speed, self.lasts_s - since)

    def due_times(self, seed: int) -> list[float]:
        """When each request is due, in seconds from the beginning; the same for the same seed."""
        chance = np.random.default_rng(seed)
        due: list[float] = []
        for since, rate, span in self.rates(seed):
            number = chance.poisson(rate * span)
            due += sorted(since + span * chance.random(number))
        return due


def day(peak: float, minutes: float) -> LoadShape:
    """A whole day, from midnight on, in so many minutes.

    Args:
        peak: requests a second at its top.
    """
    lasts_s = minutes * 60
    return LoadShape(Curve(peak, trough=QUIET), DAY_S / lasts_s, lasts_s)


def bursts(peak: float, minutes: float) -> LoadShape:
    """Little to do, and now and then, from one moment to the next, as much as at the top of a day."""
    curve = Curve(
        peak * QUIET,
        trough=1.0,
        burst=1 / QUIET,
        burst_s=BURST_S * BURST_SPEED,
        bursts_a_day=DAY_S / (BURST_EVERY_S * BURST_SPEED),
    )
    return LoadShape(curve, BURST_SPEED, minutes * 60)


SHAPES: Mapping[str, Callable[[float, float], LoadShape]] = {"day": day, "bursts": bursts}
"""By name: what makes one of its top, in requests a second, and of how many minutes it lasts."""
