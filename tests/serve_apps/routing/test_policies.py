"""What each routing policy promises, by properties and in simulated time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.routing import POLICIES
from serve_apps.routing.policy import LeastConnections, Policy, RoundRobin
from serve_apps.routing.prefix import IMBALANCE, Prefix
from serve_apps.routing.response_time import ResponseTime
from serve_apps.routing.weighted import Weighted
from tests.serve_apps.routing.simulation import simulate

ALL: list[type[Policy[int]]] = [RoundRobin, LeastConnections, Weighted, ResponseTime, Prefix]

events = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3)),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("change"), st.integers(0, 255)),
    ),
    max_size=80,
)


def test_the_table_names_every_policy() -> None:
    assert {path.partition(":")[2] for path in POLICIES.values()} == {policy.__name__ for policy in ALL}


@pytest.mark.parametrize("kind", ALL)
@given(events, st.integers(0, 1000))
def test_every_order_has_every_replica_once_whoever_comes_and_goes(
    kind: type[Policy[int]], events: list[tuple[str, int]], seed: int
) -> None:
    policy = kind(random.Random(seed))
    replicas, in_flight, now = {0, 1, 2}, [], 0.0
    for number, (what, value) in enumerate(events):
        now += 0.1
        if what == "ask":
            order = policy.order(replicas, "shared beginning " * 8 * value)
            assert sorted(order) == sorted(replicas)
            if order:
                policy.sent(order[0])
                policy.routed(order[0], str(number), now)
                in_flight.append((order[0], str(number)))
        elif what == "end" and in_flight:
            policy.completed(*in_flight.pop(value % len(in_flight)), now)
        elif what == "change":
            replicas = {bit for bit in range(8) if value >> bit & 1}
    assert policy.order([]) == []


@pytest.mark.parametrize("kind", [RoundRobin, LeastConnections, Weighted, Prefix])
@given(st.integers(1, 8), st.integers(1, 40))
def test_equals_take_turns(kind: type[Policy[int]], num_replicas: int, requests: int) -> None:
    policy = kind(random.Random(1))
    taken: Counter[int] = Counter()
    for number in range(requests):
        chosen = policy.order(range(num_replicas))[0]
        taken[chosen] += 1
        policy.sent(chosen)
        policy.completed(chosen, str(number), 1.0)
    assert max(taken.values()) - min(taken[r] for r in range(num_replicas)) <= 1


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_least_connections_keep_loads_level(steps: list[bool], num_replicas: int) -> None:
    policy = LeastConnections[int]()
    in_flight: list[int] = []
    for arrives in steps:
        if arrives:
            order = policy.order(range(num_replicas))
            loads = [in_flight.count(replica) for replica in range(num_replicas)]
            assert loads[order[0]] == min(loads)
            assert [loads[replica] for replica in order] == sorted(loads)
            policy.sent(order[0])
            in_flight.append(order[0])
        elif in_flight:
            policy.completed(in_flight.pop(0), "x", 1.0)


def test_turns_follow_given_weights_and_are_spread_evenly() -> None:
    policy = Weighted[str](weights={"a": 5.0, "b": 1.0, "c": 1.0})
    chosen = [policy.order(["a", "b", "c"])[0] for _ in range(70)]
    assert Counter(chosen) == {"a": 50, "b": 10, "c": 10}
    # The example of nginx' own description.
    assert "".join(chosen[:7]) == "aabacaa"


def test_a_prompt_goes_where_its_beginning_was_read() -> None:
    policy = Prefix[int]()
    conversations = ["".join(chr(65 + c) * 300 for c in (n, n + 1)) for n in range(3)]
    homes = []
    for text in conversations:
        homes.append(policy.order(range(3), text)[0])
        policy.sent(homes[-1])
    assert sorted(homes) == [0, 1, 2]
    for number, text in enumerate(conversations):
        assert policy.order(range(3), text + "and a question more")[0] == homes[number]
    assert policy.order(range(3), list(range(1000)))[0] in range(3)


def test_a_replica_with_too_much_to_do_is_not_preferred() -> None:
    policy = Prefix[int]()
    text = "the same beginning for all " * 20
    taken: Counter[int] = Counter()
    for _ in range(40):
        chosen = policy.order(range(2), text)[0]
        policy.sent(chosen)
        taken[chosen] += 1
    assert abs(taken[0] - taken[1]) <= IMBALANCE + 1


def test_a_slow_replica_gets_less_and_is_tried_again() -> None:
    policy = ResponseTime[int](random.Random(1))
    now = 0.0

    def ask(seconds: dict[int, float], count: int) -> Counter[int]:
        nonlocal now
        taken: Counter[int] = Counter()
        for number in range(count):
            chosen = policy.order(range(3))[0]
            policy.sent(chosen)
            policy.routed(chosen, str(number), now)
            now += seconds[chosen]
            policy.completed(chosen, str(number), now)
            taken[chosen] += 1
        return taken

    slow = ask({0: 0.1, 1: 0.1, 2: 1.0}, 200)
    assert slow[2] < 20
    recovered = ask({0: 0.1, 1: 0.1, 2: 0.1}, 3000)
    assert recovered[2] > 600


Make = Callable[[random.Random], Policy[int]]


@pytest.mark.parametrize("kind", [LeastConnections, ResponseTime, Prefix])
def test_on_equal_replicas_knowing_the_load_beats_taking_turns(kind: Make) -> None:
    turns = simulate(RoundRobin, [1.0] * 4, load=0.8)
    better = simulate(kind, [1.0] * 4, load=0.8)
    assert len(better.ends) == 4000
    assert better.p99 < turns.p99


def test_on_unequal_replicas_weights_follow_the_speed() -> None:
    speeds = [4.0, 1.0, 1.0]
    turns = simulate(RoundRobin, speeds, load=0.7)
    weighted = simulate(Weighted, speeds, load=0.7)
    assert weighted.taken[0] / weighted.taken[1] == pytest.approx(4.0, rel=0.35)
    assert weighted.p50 < 0.5 * turns.p50
    assert weighted.p99 < 0.5 * turns.p99


def test_shared_beginnings_are_read_less_often() -> None:
    together = simulate(Prefix, [1.0] * 4, load=0.7, groups=500)
    apart = simulate(LeastConnections, [1.0] * 4, load=0.7, groups=500)
    assert len(together.read) < 0.7 * len(apart.read)
    assert max(together.taken) < 1.5 * min(together.taken)
