"""When to give up: budgets of each class of failure, and the wait before another attempt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.sections.train import RecoveryConfig
from train_jobs.driver.failure_budget import BACKOFF_MOST_S, FailureBudget
from train_jobs.driver.failures import Failure, FailureClass

KEYS = {
    FailureClass.WORKER: "worker_failures",
    FailureClass.NODE: "node_failures",
    FailureClass.HANG: "hangs",
    FailureClass.START: "start_failures",
    FailureClass.MEMORY: "memory_failures",
    FailureClass.TRANSIENT: "transient_errors",
}
AT_ONCE = (FailureClass.CODE, FailureClass.LOSS)


def budget(seed: str = "job", **recovery: Any) -> FailureBudget:
    return FailureBudget(RecoveryConfig(**recovery), seed)


def failure(failure_class: FailureClass) -> Failure:
    return Failure(failure_class, "why")


@pytest.mark.parametrize("failure_class", KEYS)
def test_failures_without_progress_use_up_the_budget_of_their_class(failure_class: FailureClass) -> None:
    counted = budget(**{KEYS[failure_class]: 2})
    decisions = [counted.decide(failure(failure_class), step=5) for _ in range(3)]
    assert [decision.again for decision in decisions] == [True, True, False]
    reason = decisions[-1].reason
    assert reason.startswith(f"{failure_class}: 3 ")
    assert reason.endswith(f"in a row without a step beyond 5; recovery.{KEYS[failure_class]} allows 2")


@pytest.mark.parametrize("failure_class", KEYS)
def test_no_budget_means_no_second_attempt(failure_class: FailureClass) -> None:
    assert not budget(**{KEYS[failure_class]: 0}).decide(failure(failure_class), step=0).again


def test_progress_fills_the_budget() -> None:
    counted = budget(worker_failures=1)
    assert all(counted.decide(failure(FailureClass.WORKER), step=step).again for step in range(1, 20))
    assert not counted.decide(failure(FailureClass.WORKER), step=10).again, "it got no further than before"


@pytest.mark.parametrize("failure_class", KEYS)
def test_a_group_that_others_do_not_miss_is_started_again_for_ever_and_less_and_less_often(
    failure_class: FailureClass,
) -> None:
    counted = budget(**{KEYS[failure_class]: 1})
    decisions = [counted.decide(failure(failure_class), step=5, in_vain=number) for number in range(1, 100)]
    assert all(decision.again for decision in decisions)
    assert all(BACKOFF_MOST_S / 2 <= decision.backoff_s <= BACKOFF_MOST_S for decision in decisions[8:])
    assert decisions[0].backoff_s <= 2.0
    # Nor does it use up what the job has for itself.
    assert counted.decide(failure(failure_class), step=5).again


def test_who_wants_no_second_attempt_has_none_of_a_group_either() -> None:
    assert not budget(worker_failures=0).decide(failure(FailureClass.WORKER), step=5, in_vain=1).again


@pytest.mark.parametrize("failure_class", AT_ONCE)
def test_what_the_program_does_wrong_in_a_group_ends_the_job_too(failure_class: FailureClass) -> None:
    assert not budget().decide(failure(failure_class), step=5, in_vain=1).again


@pytest.mark.parametrize("failure_class", AT_ONCE)
@pytest.mark.parametrize("step", [0, 7])
def test_what_the_program_does_wrong_ends_the_job_at_once(failure_class: FailureClass, step: int) -> None:
    assert not budget().decide(failure(failure_class), step).again


def test_a_job_survives_ten_times_as_many_lost_nodes_as_workers_unless_told_otherwise() -> None:
    counted = budget()
    assert all(counted.decide(failure(FailureClass.NODE), step=1).again for _ in range(100))


@given(
    st.lists(st.tuples(st.sampled_from([*KEYS]), st.integers(0, 3)), max_size=40),
    st.lists(st.integers(0, 4), min_size=len(KEYS), max_size=len(KEYS)),
)
def test_each_class_counts_its_own_since_the_last_progress(
    happened: list[tuple[FailureClass, int]], allowed: list[int]
) -> None:
    limits = dict(zip(KEYS, allowed, strict=True))
    counted = budget(**{KEYS[each]: limit for each, limit in limits.items()})
    since: list[FailureClass] = []
    furthest = -1
    for failure_class, step in happened:
        if step > furthest:
            furthest, since = step, []
        since.append(failure_class)
        again = counted.decide(failure(failure_class), step).again
        assert again == (since.count(failure_class) <= limits[failure_class])


@given(st.sampled_from([*KEYS]), st.text(max_size=8))
def test_the_wait_doubles_to_a_bound_less_a_part_that_is_drawn(
    failure_class: FailureClass, seed: str
) -> None:
    counted = budget(seed, **{KEYS[failure_class]: 60})
    waits = [counted.decide(failure(failure_class), step=1).backoff_s for _ in range(50)]
    first = 2.0 if failure_class in (FailureClass.START, FailureClass.TRANSIENT) else 0.0
    most = first
    for wait in waits:
        assert most / 2 <= wait <= most
        most = min(BACKOFF_MOST_S, 2 * most if most else 1.0)
    assert waits[-1] >= BACKOFF_MOST_S / 2
    again = budget(seed, **{KEYS[failure_class]: 60})
    assert waits == [again.decide(failure(failure_class), step=1).backoff_s for _ in range(50)]


def test_two_jobs_that_fail_together_do_not_come_back_together() -> None:
    waits = set()
    for job in range(20):
        counted = budget(f"job-{job}")
        waits.add(counted.decide(failure(FailureClass.START), step=0).backoff_s)
    assert len(waits) == 20


def test_any_exception_is_tried_again_where_the_job_says_so() -> None:
    counted = budget(retry="any", worker_failures=2)
    decisions = [counted.decide(failure(FailureClass.CODE), step=0) for _ in range(3)]
    assert [decision.again for decision in decisions] == [True, True, False]
    assert (
        "3 exceptions in a row without a step beyond 0; recovery.worker_failures allows 2"
        in decisions[2].reason
    )
    assert not counted.decide(failure(FailureClass.LOSS), step=0).again


def test_what_a_script_saves_is_progress_for_all_but_its_memory() -> None:
    counted = budget(worker_failures=1, memory_failures=1)
    assert all(counted.decide(failure(FailureClass.WORKER), 0, saves=saves).again for saves in range(1, 9))
    assert not counted.decide(failure(FailureClass.WORKER), 0, saves=8).again
    assert counted.decide(failure(FailureClass.MEMORY), 0, saves=9).again
    assert not counted.decide(failure(FailureClass.MEMORY), 0, saves=10).again, "it may save the same"
    assert counted.decide(failure(FailureClass.MEMORY), 1, saves=10).again


def test_a_kernel_that_ends_badly_is_tried_again_unless_it_comes_back_at_the_same_step() -> None:
    counted = budget()
    assert counted.decide(failure(FailureClass.DEVICE), step=5).again
    assert counted.decide(failure(FailureClass.DEVICE), step=9).again
    decision = counted.decide(failure(FailureClass.DEVICE), step=9)
    assert not decision.again
    assert decision.reason == "it came back at the same step, so it is the program's"


def test_a_kernel_of_a_script_that_has_saved_in_between_did_not_come_back_at_the_same_step() -> None:
    counted = budget()
    ended = failure(FailureClass.DEVICE)
    assert counted.decide(ended, step=0, saves=0).again, "without `progress` a script is always at step 0"
    assert counted.decide(ended, step=0, saves=2).again
    assert counted.decide(failure(FailureClass.WORKER), step=0, saves=2).again
    decision = counted.decide(ended, step=0, saves=2)
    assert not decision.again
    assert decision.reason == "it came back at the same step, so it is the program's"


def test_a_kernel_of_a_script_that_saves_the_same_each_time_does_not_come_back_for_ever() -> None:
    counted = budget(node_failures=3)
    ended = failure(FailureClass.DEVICE)
    decisions = [counted.decide(ended, step=0, saves=saves) for saves in range(1, 5)]
    assert [decision.again for decision in decisions] == [True, True, True, False]
    assert "4 kernels that accelerators ended in a row without a step beyond 0" in decisions[-1].reason
