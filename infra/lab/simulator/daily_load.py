"""The load of serving apps over the day: a curve with noise and bursts, seeded; an assumption throughout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cluster.config.sections.serve import AutoscaleConfig

DAY_S = 86_400.0


@dataclass(frozen=True)
class Curve:
    """Requests a second over the day, in steps.

    rate(t) = peak x (trough + (1 - trough) x (1 + cos(2 pi (t - peak_at) / day)) / 2) x noise x burst

    where noise is lognormal with median 1 and drawn anew for each step, and burst is `burst` during bursts,
    which start as a Poisson process and last exponentially long, else 1.

    Attributes:
        peak: requests a second at the top of the curve, without noise.
        trough: the bottom of the curve, as a part of its top.
        peak_at_s: when the top is, from midnight, at which the trace starts.
        noise: standard deviation of the logarithm.
        bursts_a_day: on average.
        step_s: for which the rate stays what it is.
    """

    peak: float
    trough: float = 0.3
    peak_at_s: float = 14 * 3600.0
    noise: float = 0.05
    burst: float = 1.3
    burst_s: float = 600.0
    bursts_a_day: float = 4.0
    step_s: float = 300.0

    def base(self, moment_s: float) -> float:
        """The curve without noise and bursts."""
        wave = (1 + math.cos(2 * math.pi * (moment_s - self.peak_at_s) / DAY_S)) / 2
        return self.peak * (self.trough + (1 - self.trough) * wave)

    def steps(self, seed: int) -> Iterator[tuple[float, float]]:
        """(moment, requests a second from then on), without end."""
        chance = np.random.default_rng(seed)
        number, burst_until = 0, -1.0
        while True:
            moment = number * self.step_s
            starts, lasts_s, noise = chance.random(), chance.exponential(self.burst_s), chance.normal()
            if starts < 1 - math.exp(-self.bursts_a_day * self.step_s / DAY_S):
                burst_until = max(burst_until, moment + lasts_s)
            burst = self.burst if moment < burst_until else 1.0
            yield moment, self.base(moment) * math.exp(self.noise * noise) * burst
            number += 1


@dataclass(frozen=True)
class SimulatedApp:
    """One serving app.

    Attributes:
        tensor: devices of a replica, all on one node.
        fewest: replicas that are always there (`replicas.min`).
        most: replicas under load (`replicas.max`).
        answer_s: how long a request is in flight; with it a rate becomes requests in flight (Little's law).
        headroom: requests in flight that a replica carries within its service level, over
            `target_ongoing_requests`.
    """

    name: str
    curve: Curve
    tensor: int = 1
    fewest: int = 1
    most: int = 1
    answer_s: float = 4.0
    headroom: float = 1.25
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)

    def ongoing(self, rate: float) -> float:
        """Requests in flight at so many a second, when none waits."""
        return rate * self.answer_s

    @property
    def replica_rate(self) -> float:
        """Requests a second that one replica answers within the service level."""
        return self.autoscale.target_ongoing_requests * self.headroom / self.answer_s


PEAK_USE = 0.8
"""Part of the devices set aside for serving that the top of the curve needs: room for noise and bursts."""


def apps_for(devices: int, count: int, tensor: int) -> list[SimulatedApp]:
    """Apps whose loads together need `PEAK_USE` of these devices at the top of their curves.

    The fewest replicas of each are what the bottom of its curve needs, the most are one and a half times
    what its part of the devices holds.
    """
    replicas = max(1, devices // (tensor * count))
    apps = []
    for number in range(1, count + 1):
        targets = AutoscaleConfig()
        peak = PEAK_USE * replicas * targets.target_ongoing_requests / SimulatedApp.answer_s
        curve = Curve(peak)
        fewest = max(1, math.floor(PEAK_USE * replicas * curve.trough))
        apps.append(SimulatedApp(f"app-{number}", curve, tensor, fewest, max(1, math.ceil(1.5 * replicas))))
    return apps
