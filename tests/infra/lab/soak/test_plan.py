"""What a soak does: the same for the same seed, within its bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from infra.lab.faults.processes import TITLES
from infra.lab.soak.plan import CLIENTS, FAULTS, PAUSE_S, QUIET_CLIENTS, Fault, faults, levels


def test_a_seed_says_all_and_another_one_something_else() -> None:
    assert faults(3, 1800) == faults(3, 1800)
    assert levels(3, 1800) == levels(3, 1800)
    assert faults(3, 1800) != faults(4, 1800)
    assert levels(3, 1800) != levels(4, 1800)


@pytest.mark.parametrize("seed", range(20))
def test_faults_come_apart_and_leave_the_last_minute_in_peace(seed: int) -> None:
    planned = faults(seed, 1800)
    assert len({fault.kind for fault in planned}) > len(FAULTS) / 2
    for before, after in pairwise(planned):
        assert PAUSE_S[0] <= after.at_s - before.at_s <= PAUSE_S[1]
    assert planned[-1].at_s < 1740


@pytest.mark.parametrize("seed", range(20))
def test_the_load_rises_and_falls_and_ends_low(seed: int) -> None:
    planned = levels(seed, 1800)
    assert [load.clients == QUIET_CLIENTS for load in planned] == [True, *[False, True] * (len(planned) // 2)]
    assert all(CLIENTS[0] <= load.clients <= CLIENTS[1] for load in planned[1::2])
    assert all(before.at_s < after.at_s <= 1800 for before, after in pairwise(planned))
    assert len(planned) > 2 * 10, "more than ten rises"


def test_only_those_that_were_asked_for_are_drawn() -> None:
    kinds = ["kill_rank", "kill_broker"]
    assert {fault.kind for fault in faults(1, 1800, kinds)} == set(kinds)


def test_a_fault_hits_one_of_those_that_are_there() -> None:
    assert Fault(0, "kill_rank", 0.0).of(["a", "b"]) == "a"
    assert Fault(0, "kill_rank", 0.99).of(["a", "b"]) == "b"
    assert Fault(0, "kill_rank", 0.5).of([]) is None


def test_whatever_is_killed_is_a_process_that_is_known() -> None:
    known = {f"kill_{role.replace(' ', '_')}" for role in TITLES} | {"kill_rank", "kill_replica", "kill_node"}
    assert {kind for kind in FAULTS if kind.startswith("kill_")} <= known
