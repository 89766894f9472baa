"""Least connections, by properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.routing.least_connections import LeastConnections

replicas = st.dictionaries(st.integers(0, 9), st.integers(0, 5), min_size=1)


@given(st.lists(replicas, min_size=1, max_size=20))
def test_the_chosen_replica_has_the_fewest_connections(moments: list[dict[int, int]]) -> None:
    policy = LeastConnections[int]()
    for connections in moments:
        chosen = policy.choose(connections)
        assert connections[chosen] == min(connections.values())


@given(replicas)
def test_the_order_has_every_replica_once_and_never_falls(connections: dict[int, int]) -> None:
    order = LeastConnections[int]().order(connections)
    assert sorted(order) == sorted(connections)
    loads = [connections[replica] for replica in order]
    assert loads == sorted(loads)


@given(st.integers(1, 8), st.integers(0, 3), st.integers(1, 40))
def test_equals_take_turns(num_replicas: int, load: int, requests: int) -> None:
    policy = LeastConnections[int]()
    taken = [0] * num_replicas
    for _ in range(requests):
        taken[policy.choose(dict.fromkeys(range(num_replicas), load))] += 1
    assert max(taken) - min(taken) <= 1


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_loads_stay_level_while_requests_come_and_the_oldest_go(steps: list[bool], num_replicas: int) -> None:
    policy = LeastConnections[int]()
    in_flight: list[int] = []
    for arrives in steps:
        loads = {replica: in_flight.count(replica) for replica in range(num_replicas)}
        if arrives:
            in_flight.append(policy.choose(loads))
            after = [in_flight.count(replica) for replica in range(num_replicas)]
            assert after[in_flight[-1]] <= min(loads.values()) + 1
        elif in_flight:
            in_flight.pop(0)


def test_no_replica_is_an_error() -> None:
    with pytest.raises(LookupError):
        LeastConnections[int]().choose({})
