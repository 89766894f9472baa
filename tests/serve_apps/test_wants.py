"""How many replicas the load asks for: arithmetic over load and time."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from serve_apps.autoscaling import Wants


def wants(up_s: float = 2.0, down_s: float = 10.0, most: int = 8) -> Wants:
    return Wants(1, most, target_ongoing_requests=4, upscale_delay_s=up_s, downscale_delay_s=down_s)


def run(policy: Wants, loads: list[tuple[float, float]]) -> list[int]:
    """The wants after each (time, load)."""
    return [policy.update(load, now) for now, load in loads]


def test_a_load_must_last_before_a_replica_is_added() -> None:
    assert run(wants(), [(0, 9), (1, 9), (1.9, 9), (2, 9), (3, 9)]) == [1, 1, 1, 3, 3]


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


moments = st.lists(
    st.tuples(st.floats(0, 5, allow_nan=False), st.floats(0, 1000, allow_nan=False)), min_size=1, max_size=50
)


def timeline(steps: list[tuple[float, float]]) -> list[tuple[float, float]]:
    now, loads = 0.0, []
    for pause, load in steps:
        now += pause
        loads.append((now, load))
    return loads


@given(moments, st.integers(1, 4), st.integers(0, 6))
def test_the_want_stays_between_min_and_max(steps: list[tuple[float, float]], least: int, more: int) -> None:
    policy = Wants(least, least + more, 4, 1, 3)
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
