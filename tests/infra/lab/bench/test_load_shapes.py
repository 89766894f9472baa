"""Loads that come by themselves: how many requests are due when."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from infra.lab.bench.load_shapes import QUIET, SHAPES, bursts, day


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_seed_is_the_same_load_in_order_and_within_its_time(name: str) -> None:
    shape = SHAPES[name](5.0, 12.0)
    due = shape.due_times(1)
    assert due == shape.due_times(1) != shape.due_times(2)
    assert due == sorted(due)
    assert 0 <= due[0] < due[-1] < 12 * 60


def test_a_day_is_least_in_the_night_and_most_in_the_afternoon() -> None:
    due = day(peak=40.0, minutes=24.0).due_times(0)  # an hour a minute
    by_hour = [sum(hour * 60 <= each < hour * 60 + 60 for each in due) for hour in range(24)]
    assert by_hour[2] == pytest.approx(40 * 60 * QUIET, rel=0.1)
    assert max(by_hour[12:17]) == pytest.approx(40 * 60, rel=0.35)  # or more, in a burst
    assert sum(by_hour) / 24 == pytest.approx(40 * 60 * (1 + QUIET) / 2, rel=0.1)


def test_bursts_reach_the_top_from_one_moment_to_the_next() -> None:
    due = bursts(peak=40.0, minutes=120.0).due_times(0)
    counts = Counter(int(each // 5) for each in due)
    rates = [counts[number] / 5 for number in range(7200 // 5)]
    low = [rate for rate in rates if rate < 40 * QUIET * 1.6]
    high = [rate for rate in rates if rate > 40 * 0.6]
    assert len(low) + len(high) > 0.97 * len(rates), "there is nothing between"
    assert sum(high) / len(high) == pytest.approx(40, rel=0.1)
    assert 0.15 < len(high) / len(rates) < 0.45
    rises = sum(after > 24 >= before for before, after in pairwise(rates))
    assert 25 < rises < 75, "one in two minutes, on average, some in one another"
