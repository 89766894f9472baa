"""Traces made up after published distributions: seeded, for a cluster of any size and load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from infra.lab.simulator.jobs import Job, Trace, in_order, stretched

DAY_S = 86_400.0

DURATIONS_S: Sequence[tuple[float, float]] = (
    (0.0, 1.0),
    (0.039, 44.0),
    (0.241, 110.0),
    (0.273, 173.0),
    (0.528, 1_417.0),
    (0.556, 1_537.0),
    (0.822, 5_523.0),
    (0.849, 6_316.0),
    (0.984, 196_655.0),
    (0.996, 604_800.0),
    (0.9977, 1_001_571.0),
    (0.9998, 2_583_252.0),
    (1.0, 4_628_239.0),
)
"""How long the jobs of Philly ran: part of the jobs, seconds.

Points of the sorted run times that Alibaba's analysis compares its own with (github.com/alibaba/clusterdata,
cluster-trace-gpu-v2020/analysis/philly_runtime.csv; some 82,700 jobs of the trace of Jeon et al., USENIX ATC
2019). The seconds were read at these points; the parts follow from where in the file they stand, to within
0.02. Between the points the logarithm of the seconds is interpolated.
"""

DEVICES: Sequence[tuple[int, float]] = ((1, 0.70), (2, 0.10), (4, 0.15), (8, 0.05))
"""Devices that a job asks for and the part of jobs that do: Philly's, as Gavel's generator samples them
(Narayanan et al., OSDI 2020; github.com/stanford-futuredata/gavel, scheduler/utils.py)."""

PHILLY_DEVICES = 2_490
"""Devices of Philly's cluster. Assumption: in a larger one jobs are larger."""


@dataclass(frozen=True)
class Recipe:
    """What is generated; the fields without a source are assumptions.

    Attributes:
        days: from the first to the last submission.
        load: what all jobs compute, over what `devices` can in those days.
        devices: on which the load is put (those of training in a fixed split).
        cluster: devices of the whole cluster, for the size of its jobs.
        elastic: part of the jobs that are elastic, between half and twice what they ask for.
        longest_s: no job is longer; what the distribution has beyond it is cut to it, so that a trace of
            some days can come to its end.
        daily: how much more than on average is submitted at the busiest hour, as a part.
        users: from whom the jobs come, evenly.
        node_devices: of a node. A group that is not larger is on one node, a larger one on whole nodes.
    """

    seed: int = 0
    days: float = 7.0
    load: float = 0.8
    devices: int = 32
    cluster: int = 64
    elastic: float = 0.5
    longest_s: float = 2 * DAY_S
    daily: float = 0.5
    users: int = 20
    node_devices: int = 8

    @property
    def larger(self) -> int:
        """How many times as many devices as Philly's a job asks for: a power of two."""
        return 1 << max(0, math.floor(math.log2(max(1.0, self.cluster / PHILLY_DEVICES))))


def generate_philly(recipe: Recipe) -> Trace:
    """A trace whose jobs have Philly's sizes and durations and, together, exactly the load that is asked for.

    A job never asks for more than half of the devices that the load is put on. Submissions are a Poisson
    process whose rate follows the time of day (see `Recipe.daily`).
    """
    chance = np.random.default_rng(recipe.seed)
    due = recipe.load * recipe.devices * recipe.days * DAY_S
    largest = max(1, recipe.devices // 2)
    sizes: list[tuple[int, float]] = []
    while due > 0:
        devices = min(largest, recipe.larger * _pick(chance, DEVICES))
        duration_s = min(recipe.longest_s, duration_at(chance.random()))
        duration_s = round(min(duration_s, max(1.0, due / devices)), 1)  # the last one makes the load exact
        due -= devices * duration_s
        if 0 < due < 1.0 * devices:
            due = 0.0
        sizes.append((devices, duration_s))
    moments = _moments(chance, len(sizes), recipe)
    jobs = []
    for number, ((devices, duration_s), moment) in enumerate(zip(sizes, moments, strict=True), 1):
        user = f"user-{int(chance.integers(recipe.users)) + 1:02d}"
        job = Job(f"job-{number:05d}", moment, duration_s, group=devices, user=user)
        job = stretched(job) if chance.random() < recipe.elastic else job
        jobs.append(replace(job, tensor=math.gcd(job.group, recipe.node_devices)))
    return Trace(in_order(jobs), f"philly:{recipe.seed}")


def duration_at(part: float) -> float:
    """The seconds that this part of Philly's jobs did not run longer than."""
    for (below, low), (above, high) in pairwise(DURATIONS_S):
        if part <= above:
            return math.exp(
                math.log(low) + (math.log(high) - math.log(low)) * (part - below) / (above - below)
            )
    raise ValueError(f"{part} is no part of all jobs")


def _pick(chance: np.random.Generator, parts: Sequence[tuple[int, float]]) -> int:
    left = chance.random()
    for value, part in parts:
        left -= part
        if left < 0:
            return value
    return parts[-1][0]


def _moments(chance: np.random.Generator, count: int, recipe: Recipe) -> Iterator[float]:
    """So many moments, sorted: those of a Poisson process of this rate, given how many there were."""
    accepted: list[float] = []
    while len(accepted) < count:
        moment = chance.random() * recipe.days * DAY_S
        hour = math.cos(2 * math.pi * (moment / DAY_S - 14 / 24))  # the busiest is 14:00
        if chance.random() * (1 + recipe.daily) < 1 + recipe.daily * hour:
            accepted.append(round(moment, 1))
    return iter(sorted(accepted))
