"""How many replicas the load asks for: arithmetic over load and time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.sections.serve import AutoscaleConfig
from serve_apps.controller.wants import FirstTokens, Load, OngoingMean, Wants, asked


@dataclass
class Policy:
    """Wants with its settings."""

    targets: AutoscaleConfig
    least: int = 1
    most: int = 8
    wants: Wants = field(default_factory=Wants)

    def update(self, ongoing: float, now: float) -> int:
        ask = asked(Load(ongoing=ongoing), self.targets)
        return self.wants.update(ask, self.least, self.most, self.targets, now)


def wants(up_s: float = 2.0, down_s: float = 10.0, least: int = 1, idle_s: float = 60.0) -> Policy:
    targets = AutoscaleConfig(
        target_ongoing_requests=4, upscale_delay_s=up_s, downscale_delay_s=down_s, idle_s=idle_s
    )
    return Policy(targets, least)


def run(policy: Policy, loads: list[tuple[float, float]]) -> list[int]:
    """The wants after each (time, load)."""
    return [policy.update(load, now) for now, load in loads]


def test_a_load_must_last_before_a_replica_is_added() -> None:
    assert run(wants(), [(0, 9), (1, 9), (1.9, 9), (2, 9), (3, 9)]) == [1, 1, 1, 3, 3]


@given(st.floats(0, 1e9), st.floats(0, 3600))
def test_who_looks_again_when_the_delay_is_over_is_not_too_early(began: float, delay_s: float) -> None:
    assert run(wants(up_s=delay_s), [(began, 9), (began + delay_s, 9)])[1] == 3
    down = wants(up_s=0, down_s=delay_s)
    assert run(down, [(began, 9), (began, 0), (began + delay_s, 0)])[-1] == 1


def test_a_gap_in_the_load_starts_the_delay_again() -> None:
    assert run(wants(), [(0, 9), (1, 4), (2, 9), (3, 9), (4, 9)]) == [1, 1, 1, 1, 3]


def test_what_is_added_was_asked_for_during_the_whole_delay() -> None:
    assert run(wants(), [(0, 30), (1, 7), (2, 30), (4, 30)]) == [1, 1, 2, 2]


def test_replicas_go_when_the_load_has_been_gone_long_enough() -> None:
    policy = wants(up_s=0)
    assert run(policy, [(0, 16), (1, 0), (10.9, 0), (11, 0)]) == [4, 4, 4, 1]


def test_a_peak_while_replicas_wait_to_go_keeps_what_it_needed() -> None:
    policy = wants(up_s=0)
    assert run(policy, [(0, 16), (1, 0), (5, 11), (6, 0), (11, 0), (12, 0), (22, 0)]) == [4, 4, 4, 4, 3, 3, 1]


def test_one_request_more_than_the_target_asks_for_one_replica_more() -> None:
    policy = wants(up_s=0)
    assert run(policy, [(0, 4), (1, 4.0001), (2, 8), (3, 8.5)]) == [1, 2, 2, 3]


def test_the_last_replica_stays_for_a_while_and_a_request_brings_it_back_at_once() -> None:
    policy = wants(up_s=2, down_s=10, least=0, idle_s=30)
    # Nobody has asked yet.
    assert run(policy, [(0, 0), (1, 0)]) == [0, 0]
    # No delay: somebody waits. Down to one after 10 s, to none after 30.
    assert run(policy, [(2, 9), (3, 0), (13, 0), (32.9, 0), (33, 0)]) == [3, 3, 1, 1, 0]
    assert run(policy, [(50, 1), (51, 0), (80, 0), (80.5, 1), (82, 0), (111, 0), (112, 0)]) == [
        *(1, 1, 1, 1, 1),
        *(1, 0),
    ]


@pytest.mark.parametrize(
    ("load", "ask"),
    [
        (Load(ongoing=9, replicas=2), 3),
        # 10 wait where 2 may for each replica.
        (Load(ongoing=9, waiting=10, replicas=2), 5),
        # Three caches that are full to 0.8 where 0.5 is the aim.
        (Load(ongoing=4, cache_use=0.8, replicas=3), 5),
        (Load(ongoing=4, cache_use=0.5, replicas=3), 3),
        # 1.5 times too long, and 10 times: at most twice as many.
        (Load(ongoing=4, first_token_s=0.3, replicas=2), 3),
        (Load(ongoing=4, first_token_s=2.0, replicas=2), 4),
        # More than half of the time is used up: none is given away.
        (Load(ongoing=4, first_token_s=0.11, replicas=4), 4),
        (Load(ongoing=4, first_token_s=0.09, replicas=4), 2),
        # Nobody is there: what was long ago does not count.
        (Load(ongoing=0, first_token_s=2.0, replicas=2), 0),
        (Load(), 0),
    ],
)
def test_the_target_that_asks_for_most_counts(load: Load, ask: int) -> None:
    targets = AutoscaleConfig(
        target_ongoing_requests=4, target_queue_length=2, target_kv_cache_use=0.5, target_first_token_s=0.2
    )
    assert asked(load, targets) == ask


def test_targets_that_are_not_set_ask_for_nothing() -> None:
    load = Load(ongoing=1, waiting=100, cache_use=1.0, first_token_s=60, replicas=3)
    assert asked(load, AutoscaleConfig(target_ongoing_requests=4)) == 1


@pytest.mark.parametrize(
    ("load", "ask"),
    [
        # More than one should carry, by chance, where one has room; and less than two should, by chance.
        (Load(ongoing=7, mean_ongoing=3.0, places=8, replicas=1), 1),
        (Load(ongoing=1, mean_ongoing=6.0, places=16, replicas=2), 2),
        # Whoever comes next waits.
        (Load(ongoing=8, mean_ongoing=3.0, places=8, replicas=1), 2),
        (Load(ongoing=40, mean_ongoing=3.0, places=8, replicas=1), 10),
        # Nobody is there, nor is a replica.
        (Load(ongoing=0, mean_ongoing=3.0, places=8, replicas=1), 0),
        (Load(ongoing=0, mean_ongoing=6.0, places=16, replicas=2), 2),
        (Load(ongoing=1, mean_ongoing=0.0, places=8, replicas=1), 1),
        (Load(ongoing=1, mean_ongoing=0.1, places=8, replicas=1), 1),
        (Load(ongoing=1, mean_ongoing=0.1), 1),
    ],
)
def test_the_mean_counts_where_there_is_room(load: Load, ask: int) -> None:
    assert asked(load, AutoscaleConfig(target_ongoing_requests=4)) == ask


def test_a_number_counts_for_as_long_as_it_was_seen() -> None:
    mean = OngoingMean()
    assert mean.add(6, 10.0, now=100.0) == 6.0
    assert mean.add(0, 10.0, now=102.0) == 6.0
    assert mean.add(3, 10.0, now=106.0) == 2.0
    assert mean.add(3, 10.0, now=108.0) == 2.25
    # 6 for the last second of its two, 0 for four, 3 for five.
    assert mean.add(9, 10.0, now=111.0) == 2.1
    assert mean.add(9, 10.0, now=200.0) == 9.0
    assert mean.add(1, 0.0, now=300.0) == 1.0


@given(
    st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 50)), min_size=2, max_size=60), st.floats(0.1, 30)
)
def test_the_mean_is_that_of_the_numbers_by_time(steps: list[tuple[float, int]], window_s: float) -> None:
    mean, now, seen = OngoingMean(), 0.0, []
    for pause, number in steps:
        now += pause
        seen.append((now, number))
        found = mean.add(number, window_s, now)
    since = max(now - window_s, seen[0][0])
    spans = [(max(begun, since), max(until, since), each) for (begun, each), (until, _) in pairwise(seen)]
    expected = sum((until - begun) * each for begun, until, each in spans) / (now - since)
    assert found == pytest.approx(expected, abs=1e-6)


def test_the_time_to_first_token_is_that_of_the_last_seconds() -> None:
    times = FirstTokens(window_s=10)
    times.add([0.1, 0.2], now=0)
    assert times.percentile95(1) is None  # too few to tell
    times.add([0.1] * 93 + [5.0] * 5, now=2)
    assert times.percentile95(3) == 0.2
    times.add([5.0], now=9)
    assert times.percentile95(9.5) == 5.0
    assert times.percentile95(12.5) is None


moments = st.lists(
    st.tuples(st.floats(0, 5, allow_nan=False), st.floats(0, 1000, allow_nan=False)), min_size=1, max_size=50
)


def timeline(steps: list[tuple[float, float]]) -> list[tuple[float, float]]:
    now, loads = 0.0, []
    for pause, load in steps:
        now += pause
        loads.append((now, load))
    return loads


@given(moments, st.integers(0, 4), st.integers(0, 6))
def test_the_want_stays_between_min_and_max(steps: list[tuple[float, float]], least: int, more: int) -> None:
    policy = wants(1, 3, least)
    policy.most = least + more
    assert all(least <= want <= least + more for want in run(policy, timeline(steps)))


@given(moments, st.floats(0, 1000, allow_nan=False))
def test_a_steady_load_ends_at_its_quotient(steps: list[tuple[float, float]], load: float) -> None:
    policy = wants()
    loads = timeline(steps)
    run(policy, loads)
    end = loads[-1][0]
    final = run(policy, [(end + second, load) for second in range(1, 30)])[-1]
    assert final == max(1, min(8, math.ceil(load / 4)))


@given(moments)
def test_changes_in_one_direction_are_a_delay_apart(steps: list[tuple[float, float]]) -> None:
    policy = wants()
    loads = timeline(steps)
    got = list(zip((now for now, _ in loads), run(policy, loads), strict=True))
    changes = [
        (now, after - before) for (_, before), (now, after) in pairwise([(0.0, 1), *got]) if after != before
    ]
    for now, change in changes:
        earlier = [at for at, _ in changes if at < now]
        delay_s = 2.0 if change > 0 else 10.0
        assert now - (max(earlier) if earlier else 0.0) >= delay_s or (not earlier and now >= delay_s)
