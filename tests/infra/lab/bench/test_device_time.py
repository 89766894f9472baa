"""Who had the devices for how long, read out of the broker's events."""

from __future__ import annotations

import pytest

from infra.lab.bench.asking import TimedAnswer
from infra.lab.bench.device_time import answering_s, device_time, granted
from tests.infra.lab.bench.logs import APP, JOB, at, lease, node

NODES = [node(0, "n", 2), node(0, "m", 2), node(0, "head", 0)]


def answer(replica: str | None, sent: float, ended: float) -> TimedAnswer:
    return TimedAnswer(at(sent), at(sent), at(ended), replica, 1)


def test_device_seconds_are_counted_from_event_to_event() -> None:
    events = [
        *NODES,
        lease(2, "started", JOB, 0, 3, 0),  # a promise takes no device
        lease(4, "held", JOB, 3, 3, 3),
        lease(10, "held", JOB, 2, 2, 2),
        lease(12, "held", APP, 1, 1, 1, unit=2),
        lease(18, "released", JOB, 2, 0, 0),
    ]
    found = device_time(events, "CPU", at(0), at(20))
    assert found.total == pytest.approx(4 * 20)
    assert found.held["training"] == pytest.approx(3 * 6 + 2 * 8)
    assert found.held["serving"] == pytest.approx(2 * 8)
    assert found.nobody == pytest.approx(80 - 34 - 16)


def test_only_the_time_in_question_counts_with_what_was_so_before_it() -> None:
    events = [*NODES, lease(1, "held", JOB, 3, 3, 3), lease(100, "held", JOB, 0, 0, 0)]
    found = device_time(events, "CPU", at(50), at(60))
    assert (found.total, found.held["training"]) == pytest.approx((40, 30))


def test_strangers_and_nodes_that_go_are_no_idle_devices() -> None:
    events = [*NODES, node(5, "n", 2, "foreign_use", foreign=1), node(10, "m", 0, "node_gone")]
    found = device_time(events, "CPU", at(0), at(20))
    assert found.total == pytest.approx(4 * 10 + 2 * 10)
    assert found.strangers == pytest.approx(15)
    assert found.nobody == pytest.approx(45)


def test_other_resources_are_no_devices() -> None:
    assert device_time(NODES, "GPU", at(0), at(20)).total == 0


def test_grants_are_spans_of_time() -> None:
    events = [
        *NODES,
        lease(2, "started", JOB, 0, 3, 0),
        lease(3, "started", APP, 0, 1, 0),
        lease(6, "gave_way", JOB, 3, 2, 3),
        lease(8, "held", JOB, 2, 2, 2),
        lease(30, "grew", JOB, 2, 3, 2),
    ]
    spans = granted(events, JOB, at(4), at(10))
    assert spans == [(at(4), at(6), 3), (at(6), at(8), 2), (at(8), at(10), 2)]


def test_a_replica_answers_while_any_request_of_it_is_in_flight() -> None:
    answers = [
        answer("a", 1, 4),
        answer("a", 3, 5),  # overlaps
        answer("a", 3.5, 4),  # inside
        answer("b", 2, 3),
        answer("a", 8, 12),  # goes on after the end
        answer("b", -5, 1),  # began before
        answer(None, 4, 9),  # nobody knows whose it was
    ]
    assert answering_s(answers, at(0), at(10)) == pytest.approx(4 + 1 + 2 + 1)
    assert answering_s([], at(0), at(10)) == 0
