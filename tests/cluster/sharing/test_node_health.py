"""Which nodes fail jobs: by example, and never for what may be the program's own fault."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.sharing import node_health as module
from cluster.sharing.node_health import (
    FAILURES,
    FIRST_S,
    MEMORY_S,
    MOST_S,
    WINDOW_S,
    NodeHealth,
    Report,
    remembered,
)

A_MINUTE = 60.0


def fault(minute: float, node: str = "worker-1", job: str = "lm", **more) -> Report:
    """A lost worker of a job with ranks elsewhere, each at another step unless said."""
    facts = {"against": "worker", "step": int(minute * 100), "elsewhere": True, **more}
    return Report(node, f"job/{job}", time=1000.0 + minute * A_MINUTE, **facts)


def told(*reports: Report, failures: int = FAILURES) -> NodeHealth:
    health = NodeHealth(failures)
    for report in reports:
        health.report(report)
    return health


def avoided(health: NodeHealth, minute: float) -> set[str]:
    return set(health.avoided(1000.0 + minute * A_MINUTE))


def test_a_node_on_which_a_jobs_ranks_fail_while_those_elsewhere_do_not_is_avoided_for_a_while() -> None:
    health = told(fault(0), fault(4), fault(9))
    assert avoided(health, 9) == {"worker-1"}
    (verdict,) = health.avoided(1000.0 + 9 * A_MINUTE).values()
    assert (verdict.times, verdict.until - verdict.since) == (1, FIRST_S)
    assert verdict.reason == "3 failures of job/lm within 9 minutes"
    assert avoided(health, 9 + FIRST_S / A_MINUTE - 0.1) == {"worker-1"}
    assert avoided(health, 9 + FIRST_S / A_MINUTE) == set()


def test_two_failures_are_none_too_many_and_old_ones_do_not_count() -> None:
    assert avoided(told(fault(0), fault(5)), 5) == set()
    later = WINDOW_S / A_MINUTE
    assert avoided(told(fault(0), fault(5), fault(later + 1)), later + 1) == set()
    assert avoided(told(fault(0), fault(5), fault(later)), later) == {"worker-1"}


def test_as_many_failures_as_the_config_says_and_none_where_it_says_none() -> None:
    assert avoided(told(fault(0), failures=1), 0) == {"worker-1"}
    assert avoided(told(*(fault(minute) for minute in range(50)), failures=0), 50) == set()


def test_a_crash_that_comes_back_at_the_same_step_is_the_programs() -> None:
    assert avoided(told(*(fault(minute, step=7) for minute in range(30))), 30) == set()


def test_a_job_that_runs_on_this_node_only_needs_another_to_say_so() -> None:
    alone = [fault(minute, elsewhere=False) for minute in range(10)]
    assert avoided(told(*alone), 10) == set()
    assert avoided(told(*alone, fault(11, job="other", elsewhere=False)), 11) == {"worker-1"}


def test_a_job_that_fails_wherever_it_runs_clears_the_node_that_it_blamed() -> None:
    health = told(fault(0), fault(4), fault(9))
    assert [event.cause for event in health.changes(1000.0 + 9 * A_MINUTE)] == ["node_avoided"]
    health.report(fault(12, node="worker-2"))
    assert avoided(health, 12) == set()
    (event,) = health.changes(1000.0 + 12 * A_MINUTE)
    assert (event.cause, event.node) == ("node_trusted", "worker-1")
    assert event.reason == "worker-1 is trusted again: who blamed it fails elsewhere too"


def test_a_node_that_is_lost_again_and_again_is_avoided_however_many_saw_it_go() -> None:
    seen_by_many = [
        fault(minute, job=job, against="node", lost="id-1") for minute in (0, 0.5) for job in ("a", "b", "c")
    ]
    assert avoided(told(*seen_by_many), 1) == set()
    flapping = [fault(minute, against="node", lost=f"id-{minute}", elsewhere=False) for minute in (0, 9, 20)]
    assert avoided(told(*flapping), 20) == {"worker-1"}


def test_what_hits_many_jobs_in_one_moment_happened_once() -> None:
    storm = [fault(index / A_MINUTE, job=f"job-{index}") for index in range(4)]
    assert avoided(told(*storm), 1) == set()
    assert avoided(told(*storm, fault(5), fault(6, job="other")), 6) == {"worker-1"}


def test_the_time_doubles_with_each_further_time_to_a_bound_and_starts_anew_after_a_good_while() -> None:
    health, minute, lasted = NodeHealth(), 0.0, []
    for _ in range(12):
        for _ in range(FAILURES):
            minute += 1
            health.report(fault(minute))
        (verdict,) = health.avoided(1000.0 + minute * A_MINUTE).values()
        lasted.append(verdict.until - verdict.since)
        minute = (verdict.until - 1000.0) / A_MINUTE
    assert lasted == [min(MOST_S, FIRST_S * 2**times) for times in range(12)]
    minute += MOST_S / A_MINUTE + 10
    for _ in range(FAILURES):
        minute += 1
        health.report(fault(minute))
    (verdict,) = health.avoided(1000.0 + minute * A_MINUTE).values()
    assert (verdict.times, verdict.until - verdict.since) == (1, FIRST_S)


def test_a_long_time_is_not_cut_short_by_what_is_said_of_others() -> None:
    health, minute = NodeHealth(), 0.0
    for _ in range(3 * FAILURES):
        minute += 1
        health.report(fault(minute))
    (verdict,) = health.avoided(1000.0 + minute * A_MINUTE).values()
    assert verdict.until - verdict.since == 4 * FIRST_S
    almost = (verdict.until - 1000.0) / A_MINUTE - 1
    health.report(fault(almost, node="worker-2", job="other"))
    assert avoided(health, almost) == {"worker-1"}


def test_a_node_that_is_forgiven_starts_anew() -> None:
    health = told(fault(0), fault(4), fault(9))
    health.changes(1000.0 + 9 * A_MINUTE)
    event = health.forgive("worker-1", 1000.0 + 10 * A_MINUTE)
    assert (event.cause, event.reason) == ("node_trusted", "worker-1 is trusted again: it was forgiven")
    assert avoided(health, 10) == set()
    assert health.changes(1000.0 + 10 * A_MINUTE) == [], "it was said once"
    for minute in (11, 12):
        health.report(fault(minute))
    assert avoided(health, 12) == set()
    health.report(fault(13))
    assert avoided(health, 13) == {"worker-1"}


def test_changes_are_told_once_and_a_time_that_is_over_is_told_too() -> None:
    health = told(fault(0), fault(4), fault(9))
    now = 1000.0 + 9 * A_MINUTE
    (event,) = health.changes(now)
    assert (event.cause, event.node) == ("node_avoided", "worker-1")
    assert event.reason == (
        "worker-1 is avoided until 1970-01-01T00:35:40+00:00: 3 failures of job/lm within 9 minutes"
    )
    assert health.changes(now + 1) == []
    (event,) = health.changes(now + FIRST_S)
    assert event.reason == "worker-1 is trusted again: its time is over"


REPORTS = st.builds(
    fault,
    st.integers(0, 200),
    node=st.sampled_from(["worker-1", "worker-2", "worker-3"]),
    job=st.sampled_from(["a", "b"]),
    against=st.sampled_from(["worker", "transient", "node"]),
    step=st.integers(0, 9),
    elsewhere=st.booleans(),
    lost=st.sampled_from([None, "id-1", "id-2"]),
)


@given(st.lists(REPORTS, max_size=25), st.integers(0, 200))
def test_what_was_written_down_is_known_again_after_a_restart(reports: list[Report], forgiven: int) -> None:
    health, log = NodeHealth(), []
    for report in sorted(reports, key=lambda each: each.time):
        log.append(health.report(report))
    log.append(health.forgive("worker-2", 1000.0 + forgiven * A_MINUTE))
    again = NodeHealth()
    again.recall([json.loads(json.dumps(event.as_json())) for event in log])
    for minute in range(0, 400, 20):
        now = 1000.0 + minute * A_MINUTE
        assert again.avoided(now) == health.avoided(now)


@given(st.lists(REPORTS, max_size=25))
def test_no_node_is_avoided_without_three_failures_that_may_be_its_own(reports: list[Report]) -> None:
    health = told(*reports)
    for minute in range(0, 400, 10):
        for node in avoided(health, minute):
            mine = [each for each in reports if each.node == node]
            workers = [each for each in mine if each.against != "node"]
            ranks = {
                (each.holder, each.step)
                for each in workers
                if not any(
                    other.holder == each.holder
                    and other.node != node
                    and other.against != "node"
                    and abs(other.time - each.time) <= WINDOW_S
                    for other in reports
                )
            }
            lost = Counter((each.lost or each.time) for each in mine if each.against == "node")
            assert len(ranks) + len(lost) >= FAILURES


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500)), min_size=1, max_size=40))
def test_a_program_that_crashes_at_one_step_never_costs_a_node(crashes: list[tuple[int, int]]) -> None:
    """Wherever its crashing rank happens to be, and however often it is tried again."""
    reports = [fault(minute, node=f"worker-{node}", step=3) for node, minute in crashes]
    health = told(*reports)
    assert not any(avoided(health, minute) for minute in range(0, 600, 5))


@given(st.lists(REPORTS, max_size=25))
def test_what_is_said_of_one_node_does_not_depend_on_nodes_that_were_lost(reports: list[Report]) -> None:
    """Lost nodes are nobody's fault but their own: they discredit no job."""
    lost = [replace(each, node="worker-9", against="node", lost="id-9") for each in reports]
    one, other = told(*reports), told(*reports, *lost)
    for minute in range(0, 400, 20):
        assert avoided(one, minute) == avoided(other, minute) - {"worker-9"}


def test_a_node_whose_accelerator_ended_a_kernel_is_avoided_at_once_until_the_program_fails_elsewhere() -> (
    None
):
    first = fault(0, against="device", elsewhere=False)
    assert avoided(told(first), 0) == {"worker-1"}
    assert avoided(told(first), FIRST_S / A_MINUTE) == set()
    again = fault(1, node="worker-2", against="device", step=0, elsewhere=False)
    assert avoided(told(first, again), 1) == set(), "it is the program's"
    assert avoided(told(first, failures=0), 0) == set()


# -- what is read again after a restart ---------------------------------------------------------------------


def written(*reports: Report) -> list[dict[str, Any]]:
    return [NodeHealth().report(report).as_json() for report in reports]


AFTER_A_WHILE = st.tuples(
    st.integers(0, 25) | st.integers(25, 60), st.sampled_from(["worker-1", "worker-2"]), st.integers(0, 9)
)


@given(st.lists(AFTER_A_WHILE, max_size=30))
@example([(20, "worker-1", 1)] * 4)
@example([(23, "worker-1", 1)] * 12 + [(47, "worker-2", 1), (1, "worker-1", 1)])
@settings(deadline=None)
def test_what_is_remembered_over_a_restart_is_all_that_still_counts(
    happened: list[tuple[int, str, int]],
) -> None:
    """Over weeks, each failure being enough that a node is avoided, and one in ten times it is forgiven."""
    health, log, last = NodeHealth(1), [], 0
    for step, (hours, node, draw) in enumerate(happened):
        last += hours
        report = fault(60 * last, node=node, job=f"on-{node}", step=step)
        event = health.report(report) if draw else health.forgive(node, report.time)
        log.append(event.as_json())
    for hours_later in (0, 5, 30, 60):
        now = 1000.0 + 60 * (last + hours_later) * A_MINUTE
        again = NodeHealth(1)
        again.recall(list(remembered(reversed(log), now))[::-1])
        assert again.avoided(now) == health.avoided(now)


def test_no_more_is_read_than_counts() -> None:
    days = 24 * 60.0
    old = [fault(minute) for minute in (0, 1, 2)]
    counts = [fault(5 * days + minute) for minute in (0, 1, 2)]
    of_others = [fault(2.9 * days, node="worker-2"), fault(3.1 * days, node="worker-2")]
    log = written(*old, *of_others, *counts)
    now = 1000.0 + 6.5 * days * A_MINUTE
    assert len(list(remembered(reversed(log), now))) == 4, "to two days before the first that counts"
    assert list(remembered(reversed(log), now + MEMORY_S)) == []
    first = {"cause": "broker_started", "facts": {"restarted": False}}
    again = {"cause": "broker_started", "facts": {"restarted": True}}
    assert len(list(remembered(reversed([*log, first, *written(counts[0]), again]), now))) == 1


def test_no_more_reports_are_read_than_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(module, "_MOST_REPORTS", 5)
    log = written(*(fault(minute) for minute in range(20)))
    kept = list(remembered(reversed(log), 1000.0 + 20 * A_MINUTE))
    assert [each["facts"]["step"] for each in kept] == [1900, 1800, 1700, 1600, 1500]


def test_what_another_version_wrote_otherwise_is_left_out() -> None:
    health = NodeHealth(1)
    (known,) = written(fault(0))
    strange = [{**known, "facts": {"node": "worker-2", "time": 1000.0}}, {"cause": "node_blamed"}]
    health.recall([*strange, {**known, "facts": {**known["facts"], "more": 1}}])
    assert avoided(health, 0) == {"worker-1"}
