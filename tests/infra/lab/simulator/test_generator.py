"""Generated traces have the distributions, the load and the seed that were asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from infra.lab.simulator.generator import DAY_S, DURATIONS_S, Recipe, duration_at
from infra.lab.simulator.jobs import Trace
from infra.lab.simulator.source import trace_of

LARGE = Recipe(seed=5, days=12, devices=1000, cluster=2000, elastic=0.3, longest_s=60 * DAY_S)


@pytest.fixture(scope="module")
def large() -> Trace:
    return trace_of("philly", LARGE)


def test_durations_are_those_that_were_published(large: Trace) -> None:
    seconds = np.array([job.duration_s for job in large.jobs])
    assert len(seconds) > 5000
    for part, published_s in DURATIONS_S[1:-1]:
        assert np.mean(seconds <= published_s) == pytest.approx(part, abs=0.015)


def test_between_the_published_points_durations_only_grow() -> None:
    parts = np.linspace(0, 1, 1001)
    seconds = [duration_at(part) for part in parts]
    assert seconds == sorted(seconds)
    assert (seconds[0], seconds[-1]) == pytest.approx((1, 4_628_239))


def test_sizes_and_the_part_of_elastic_jobs_are_those_that_were_asked_for(large: Trace) -> None:
    jobs = large.jobs
    sizes = Counter(job.devices for job in jobs)
    for devices, part in ((1, 0.70), (2, 0.10), (4, 0.15), (8, 0.05)):
        assert sizes[devices] / len(jobs) == pytest.approx(part, abs=0.02)
    assert sum(job.elastic for job in jobs) / len(jobs) == pytest.approx(0.3, abs=0.02)
    for job in jobs:
        assert job.min_groups <= job.groups <= job.max_groups
        assert job.group % job.tensor == 0


@pytest.mark.parametrize("devices", [32, 221, 1772])
def test_the_load_is_exact_whatever_the_tail_of_the_durations(devices: int) -> None:
    recipe = Recipe(seed=2, devices=devices, cluster=2 * devices, load=0.7, days=5)
    trace = trace_of("philly", recipe)
    assert trace.device_seconds == pytest.approx(0.7 * devices * 5 * DAY_S, rel=1e-3)
    assert 0.9 * 5 * DAY_S < trace.span_s <= 5 * DAY_S
    assert max(job.devices for job in trace.jobs) <= devices // 2
    assert max(job.duration_s for job in trace.jobs) <= recipe.longest_s


def test_more_is_submitted_by_day_than_by_night(large: Trace) -> None:
    moments = np.array([job.submit_s % DAY_S for job in large.jobs])
    day = np.mean((moments > 8 * 3600) & (moments <= 20 * 3600))
    # The mean of 1 + 0.5 cos over the half of the day around its top is 1 + 1 / pi.
    assert day == pytest.approx(0.5 * (1 + 1 / np.pi), abs=0.02)


def test_a_larger_cluster_has_larger_jobs() -> None:
    def larger(cluster: int) -> int:
        return Recipe(cluster=cluster).larger

    assert [larger(devices) for devices in (64, 3544, 10_000)] == [1, 1, 4]


def test_the_seed_decides() -> None:
    recipe = Recipe(days=1)
    assert trace_of("philly:7", recipe) == trace_of("philly:7", replace(recipe, seed=1))
    assert trace_of("philly:7", recipe).jobs != trace_of("philly:8", recipe).jobs
    assert trace_of("philly", replace(recipe, seed=7)).jobs == trace_of("philly:7", recipe).jobs
