"""The serving load follows its documented curve, and the product's autoscaler decides what it needs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from infra.lab.simulator.daily_load import DAY_S, PEAK_USE, Curve, apps_for
from infra.lab.simulator.serving import AppRun
from tests.infra.lab.simulator.worlds import app

CALM = Curve(10.0, trough=0.3, noise=0.0, bursts_a_day=0.0)


def rates(curve: Curve, days: float, seed: int = 1) -> np.ndarray:
    count = int(days * DAY_S / curve.step_s)
    return np.array([rate for _, rate in itertools.islice(curve.steps(seed), count)])


def test_without_noise_the_load_is_a_cosine_between_trough_and_peak() -> None:
    day = rates(CALM, 1)
    assert (day.max(), day.min()) == pytest.approx((10, 3))
    assert day.argmax() * CALM.step_s == 14 * 3600
    assert day.mean() == pytest.approx(6.5)
    assert day == pytest.approx(rates(CALM, 2)[len(day) :])


def test_noise_and_bursts_have_the_size_and_frequency_that_they_should() -> None:
    noisy = np.log(rates(replace(CALM, noise=0.1), 30) / rates(CALM, 30))
    assert (noisy.mean(), noisy.std()) == pytest.approx((0, 0.1), abs=0.005)
    # A burst covers the step it starts in and those that begin while it lasts: 1 + 1 / (e^(1/2) - 1) steps.
    bursts = rates(replace(CALM, bursts_a_day=4, burst=2.0), 200) / rates(CALM, 200)
    steps = 1 + 1 / (np.exp(300 / 600) - 1)
    assert set(np.round(bursts, 6)) == {1, 2}
    assert np.mean(bursts > 1.5) == pytest.approx(4 * steps * 300 / DAY_S, rel=0.2)


def test_the_seed_decides() -> None:
    curve = Curve(10.0)
    assert (rates(curve, 1, 3) == rates(curve, 1, 3)).all()
    assert (rates(curve, 1, 3) != rates(curve, 1, 4)).any()


def test_the_peak_of_all_apps_needs_the_part_of_the_devices_that_it_should() -> None:
    apps = apps_for(240, 3, 4)
    wanted = [each.ongoing(each.curve.peak) / each.autoscale.target_ongoing_requests for each in apps]
    assert sum(wanted) * 4 == pytest.approx(PEAK_USE * 240)
    assert [(each.fewest, each.most) for each in apps] == [(4, 30)] * 3


def test_replicas_are_wanted_and_given_up_after_the_delays_of_the_autoscaler() -> None:
    run = AppRun(app([0], fewest=1, most=5))  # 8 in flight a replica, 4 s each: 2 requests a second
    seen = []
    for now, rate in ((0, 7.9), (0.5, 7.9), (1, 7.9), (100, 2), (129, 2), (130, 2), (140, 100), (141, 100)):
        run.rate = rate
        run.look(now)
        seen.append(run.demand().max)
    assert seen == [1, 1, 4, 4, 4, 1, 1, 5]
