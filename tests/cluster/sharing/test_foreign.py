"""What strangers use, told apart from units of holders that start and stop between two heartbeats."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.sharing.foreign import ForeignUse, countable

NONE: dict[str, dict[str, float]] = {}


def cpus(amount: float, node: str = "a") -> dict[str, dict[str, float]]:
    return {node: {"CPU": amount}}


def test_what_stays_in_use_beyond_the_leases_is_a_strangers():
    foreign = ForeignUse(after_s=6)
    assert [foreign.update(cpus(3), cpus(1), now) for now in (0, 2, 4)] == [NONE] * 3
    assert foreign.update(cpus(3), cpus(1), 6) == cpus(2)
    assert foreign.update(cpus(3), cpus(2), 7) == cpus(1), "a holder says that one of them is its own"
    assert foreign.update(cpus(1), cpus(1), 8) == NONE


def test_a_unit_that_its_holder_has_not_spoken_of_yet_is_no_strangers():
    foreign = ForeignUse(after_s=6)
    for now in range(10):
        assert foreign.update(cpus(1), cpus(1), now) == NONE
    assert foreign.update(cpus(2), cpus(1), 10) == NONE
    assert foreign.update(cpus(2), cpus(1), 14) == NONE
    assert foreign.update(cpus(2), cpus(2), 15) == NONE
    assert foreign.update(cpus(2), cpus(1), 16) == NONE, "it counts anew"
    assert foreign.update(cpus(2), cpus(1), 21) == NONE
    assert foreign.update(cpus(2), cpus(1), 22) == cpus(1)


def test_what_is_leased_and_not_in_use_is_nobodys_concern():
    foreign = ForeignUse(after_s=1)
    assert [foreign.update(cpus(0), cpus(2), now) for now in range(4)] == [NONE] * 4


def test_a_node_that_went_and_came_back_is_looked_at_anew():
    foreign = ForeignUse(after_s=5)
    foreign.update(cpus(1), NONE, 0)
    foreign.update(NONE, NONE, 3)
    assert foreign.update(cpus(1), NONE, 6) == NONE
    assert foreign.update(cpus(1), NONE, 11) == cpus(1)


def test_memory_and_names_of_nodes_are_not_counted():
    assert countable({"CPU": 1, "memory": 5, "object_store_memory": 5, "node:1.2.3.4": 1, "TPU": 2}) == {
        "CPU": 1,
        "TPU": 2,
    }


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 4)), max_size=30))
def test_never_more_than_was_beyond_the_leases_at_any_time_of_the_window(samples):
    foreign, now, history = ForeignUse(after_s=6), 0, []
    for seconds, used, leased in samples:
        now += seconds
        history.append((now, max(0, used - leased)))
        found = foreign.update(cpus(used), cpus(leased), now).get("a", {}).get("CPU", 0)
        window = [beyond for time, beyond in history if time >= now - 6]
        assert found <= min(window)
        if history[0][0] <= now - 6:
            before = [beyond for time, beyond in history if time <= now - 6][-1:]
            assert found == min(window + before)
        else:
            assert found == 0
