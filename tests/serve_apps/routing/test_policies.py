"""What each routing policy promises, by properties and in simulated time."""

from __future__ import annotations

import random
import re
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
                policy.routed(order[0], str(number), now, "shared beginning " * 8 * value)
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
    chosen = []
    for _ in range(70):
        chosen.append(policy.order(["a", "b", "c"])[0])
        policy.sent(chosen[-1])
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
        policy.routed(homes[-1], text, 0.0, text)
    assert sorted(homes) == [0, 1, 2]
    for number, text in enumerate(conversations):
        assert policy.order(range(3), text + "and a question more")[0] == homes[number]
    assert policy.order(range(3), list(range(1000)))[0] in range(3)


@pytest.mark.parametrize("kind", ALL)
def test_an_order_alone_teaches_nothing(kind: type[Policy[int]]) -> None:
    """A request that waits for a place is ordered again and again, and goes where one becomes free."""
    text = "a beginning that nobody has read " * 10

    def orders(times: int) -> list[int]:
        policy = kind(random.Random(3))
        for _ in range(times):
            policy._chance = random.Random(3)
            order = policy.order(range(4), text)
        return order

    assert orders(50) == orders(1)


def test_a_beginning_is_where_its_request_went_and_not_where_it_was_planned() -> None:
    policy = Prefix[int]()
    text = "a long beginning of many requests " * 10
    planned = policy.order(range(3), text)[0]
    went = (planned + 1) % 3  # the best one had no room
    policy.sent(went)
    policy.routed(went, "1", 0.0, text)
    policy.completed(went, "1", 1.0)
    assert policy.order(range(3), text)[0] == went


def test_near_saturation_beginnings_are_still_found() -> None:
    """Where a request seldom goes where it was planned, plans teach what is wrong (0.89 and more)."""
    together = simulate(Prefix, [1.0] * 4, load=0.9, groups=500)
    apart = simulate(LeastConnections, [1.0] * 4, load=0.9, groups=500)
    assert len(together.read) < 0.84 * len(apart.read)


def test_a_replica_with_too_much_to_do_is_not_preferred() -> None:
    policy = Prefix[int]()
    text = "the same beginning for all " * 20
    taken: Counter[int] = Counter()
    for _ in range(40):
        chosen = policy.order(range(2), text)[0]
        policy.sent(chosen)
        policy.routed(chosen, "x", 0.0, text)
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


@pytest.mark.parametrize("kind", ALL)
def test_on_equal_replicas_no_policy_is_worse_than_taking_turns(kind: Make) -> None:
    """What waits at the router goes where a place becomes free, whatever the policy."""
    turns = simulate(RoundRobin, [1.0] * 4, load=0.8)
    other = simulate(kind, [1.0] * 4, load=0.8)
    assert len(other.ends) == 4000
    assert other.p99 <= 1.001 * turns.p99
    assert max(other.taken) < 1.3 * min(other.taken)


def test_on_unequal_replicas_weights_follow_the_speed() -> None:
    speeds = [4.0, 1.0, 1.0]
    turns = simulate(RoundRobin, speeds, load=0.7)
    weighted = simulate(Weighted, speeds, load=0.7)
    assert weighted.taken[0] / weighted.taken[1] == pytest.approx(4.0, rel=0.35)
    assert weighted.p50 < 0.85 * turns.p50


def test_shared_beginnings_are_read_less_often() -> None:
    together = simulate(Prefix, [1.0] * 4, load=0.7, groups=500)
    apart = simulate(LeastConnections, [1.0] * 4, load=0.7, groups=500)
    assert len(together.read) < 0.6 * len(apart.read)
    assert max(together.taken) < 1.5 * min(together.taken)


@pytest.mark.parametrize(
    "common", ["", "You are a helpful assistant. " * 70], ids=["apart", "one system prompt"]
)
def test_several_gateways_find_the_same_replicas(common: str) -> None:
    """Each has its own memory, and hears nothing of the others."""
    reads = {
        gateways: len(
            simulate(Prefix, [1.0] * 4, load=0.6, groups=500, gateways=gateways, common=common).read
        )
        for gateways in (1, 3)
    }
    apart = simulate(LeastConnections, [1.0] * 4, load=0.6, groups=500, common=common)
    print(f"{reads} of {len(apart.read)}")
    assert reads[3] < 0.6 * len(apart.read)
    assert reads[3] < 1.25 * reads[1]


def test_a_replica_that_comes_moves_only_its_own_beginnings() -> None:
    """As a gateway finds it that has just started."""
    texts = [f"{number:>8}" * 16 for number in range(400)]
    before = [Prefix[int]().order(range(4), text)[0] for text in texts]
    after = [Prefix[int]().order(range(5), text)[0] for text in texts]
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert set(moved) == {4}
    assert len(moved) == pytest.approx(400 / 5, rel=0.3)
    assert all(count == pytest.approx(100, rel=0.3) for count in Counter(before).values())


@pytest.mark.parametrize("kind", ALL)
def test_every_policy_says_what_it_decided_by(kind: Make) -> None:
    policy = kind(random.Random(1))
    reasons = {policy.routed(number % 2, str(number), 0.0) for number in range(4)}
    assert len(reasons) == 1
    assert all(re.fullmatch("[a-z_]+", reason) for reason in reasons)


def test_the_prefix_policy_tells_affinity_from_load() -> None:
    policy = Prefix[int]()
    text = "the same beginning for all " * 20

    def route(prompt: str) -> tuple[int, str]:
        chosen = policy.order(range(2), prompt)[0]
        policy.sent(chosen)
        return chosen, policy.routed(chosen, "x", 0.0, prompt)

    first, reason = route(text)
    assert reason == "connections"
    assert [route(text) for _ in range(IMBALANCE)] == [(first, "affinity")] * IMBALANCE
    assert route(text) == (1 - first, "overload")
    assert route("short")[1] == "connections"
    assert route("quite another beginning " * 20)[1] == "connections"
