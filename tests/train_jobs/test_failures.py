"""Judging failures: the cause among what the ranks say, and when to give up."""

from __future__ import annotations

from train_jobs.errors import ScriptError
from train_jobs.failures import Failure, FailureBudget, FailureClass, RankFailure, classify
from train_jobs.rank import is_collective

NODES = ["n1", "n2"]
NAMES = {"n1": "worker-1", "n2": "worker-2"}


def peer_lost(rank: int) -> RankFailure:
    return RankFailure(rank, 7, "RuntimeError", "gloo: Connection closed by peer", "", collective=True)


def test_the_dead_process_is_the_cause_and_not_the_rank_that_lost_it() -> None:
    dead = RankFailure(1, None, "ActorDiedError", "killed", "", died=True)
    failure = classify([peer_lost(0), dead], NODES, NAMES.keys(), NAMES)
    assert (failure.failure_class, failure.rank, failure.node) == (FailureClass.WORKER, 1, "worker-2")


def test_a_dead_process_that_is_of_no_rank_is_the_groups() -> None:
    dead = RankFailure(None, None, "ActorDiedError", "killed", "", died=True)
    failure = classify([dead], NODES, NAMES.keys(), NAMES)
    assert (failure.failure_class, failure.rank, failure.node) == (FailureClass.WORKER, None, None)
    assert failure.reason == "the process of the group ended: killed"


def test_a_script_that_lost_its_peer_made_no_mistake() -> None:
    lost = ScriptError(
        "the script ended with exit code 1", "RuntimeError: [../gloo/transport/tcp/pair.cc:547]"
    )
    assert is_collective(lost)
    assert not is_collective(ScriptError("the script ended with exit code 1", "KeyError: 'gloo'"))
    assert is_collective(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    assert not is_collective(KeyError("Connection closed by peer"))


def test_the_users_exception_is_the_cause_and_not_the_rank_that_lost_its_peer() -> None:
    mistake = RankFailure(1, 3, "KeyError", "'x'", "Traceback …")
    failure = classify([peer_lost(0), mistake], NODES, NAMES.keys(), NAMES)
    assert (failure.failure_class, failure.step, failure.trace) == (FailureClass.CODE, 3, "Traceback …")


def test_a_wrong_request_has_no_second_chance_unless_the_job_has_stepped() -> None:
    wrong = RankFailure(1, 0, "RequestError", "the tokenizer knows more tokens", "Traceback …")
    failure = classify([peer_lost(0), wrong], NODES, NAMES.keys(), NAMES)
    assert (failure.failure_class, failure.reason) == (
        FailureClass.REQUEST,
        "the tokenizer knows more tokens",
    )
    assert not FailureBudget(10).decide(failure, step=0).again
    budget = FailureBudget(10)
    assert [budget.decide(failure, step=9).again for _ in range(2)] == [True, False]


def test_a_node_that_is_gone_explains_everything() -> None:
    failure = classify([peer_lost(0)], NODES, {"n1"}, NAMES)
    assert (failure.failure_class, failure.node, failure.rank) == (FailureClass.NODE, "worker-2", 1)


def test_a_collective_that_times_out_is_a_hang() -> None:
    late = RankFailure(0, 2, "RuntimeError", "gloo: Timed out waiting 1000ms for recv", "", collective=True)
    assert classify([late], NODES, NAMES.keys(), NAMES).failure_class is FailureClass.HANG


def test_a_group_that_could_not_start_says_why() -> None:
    failure = classify(
        [RankFailure(None, None, "ControllerError", "no resources", "")], NODES, NAMES.keys(), NAMES
    )
    assert failure.failure_class is FailureClass.START
    assert "no resources" in failure.reason


def test_an_exception_that_comes_back_at_the_same_step_ends_the_job() -> None:
    budget = FailureBudget(worker_failures=10)
    mistake = Failure(FailureClass.CODE, "KeyError: 'x'", step=3)
    assert budget.decide(mistake, step=3).again
    assert not budget.decide(mistake, step=3).again


def test_an_exception_at_another_step_gets_its_own_second_chance() -> None:
    budget = FailureBudget(worker_failures=10)
    assert budget.decide(Failure(FailureClass.CODE, "OSError: disk", step=3), step=3).again
    assert budget.decide(Failure(FailureClass.CODE, "OSError: disk", step=9), step=9).again


def test_failures_without_progress_use_the_budget_up_and_progress_fills_it() -> None:
    budget = FailureBudget(worker_failures=2)
    lost = Failure(FailureClass.WORKER, "the process of rank 1 ended")
    assert [budget.decide(lost, step=5).again for _ in range(3)] == [True, True, False]
    budget = FailureBudget(worker_failures=2)
    assert all(budget.decide(lost, step=step).again for step in range(1, 20))


def test_no_budget_means_no_second_attempt() -> None:
    assert not FailureBudget(0).decide(Failure(FailureClass.NODE, "gone"), step=0).again


def test_the_wait_before_another_attempt_grows_to_a_bound() -> None:
    budget = FailureBudget(worker_failures=20)
    lost = Failure(FailureClass.WORKER, "gone")
    waits = [budget.decide(lost, step=1).backoff_s for _ in range(12)]
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert waits[-1] == 30
