"""How long units take from the want to where they run, as the ledger sees it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.sharing.demand import Demand, Node
from cluster.sharing.events import Event
from cluster.sharing.explain import explain
from cluster.sharing.ledger import Ledger

CPU = {"CPU": 1.0}


class Course:
    """A node of two devices, a job and an app; what is said of hand-overs."""

    def __init__(self, cpus: float = 2.0, **options: float) -> None:
        self.ledger = Ledger("serving", settle_s=0.0, **options)  # type: ignore[arg-type]
        self.ledger.update_nodes([Node("n", {"CPU": cpus}, name="worker-1")])

    def job(self, now: float, most: int, held: int, starting: int = 0) -> int:
        demand = Demand("job/x", "training", CPU, 1, most, ("n",) * held, starting=("n",) * starting)
        return self.ledger.request(demand, now).units

    def app(self, now: float, least: int, held: int, starting: int = 0, most: int | None = None) -> int:
        most = least if most is None else most
        demand = Demand("app/c", "serving", CPU, least, most, ("n",) * held, starting=("n",) * starting)
        return self.ledger.request(demand, now).units

    def told(self) -> Sequence[Event]:
        return [event for event in self.ledger.take_events() if event.cause == "handed_over"]


def a_rise(course: Course) -> None:
    """The job has both, the app takes one."""
    assert course.job(0.0, 2, 0) == 2
    course.job(1.0, 2, 2)
    course.told()
    assert course.app(10.0, 1, 0) == 0
    assert course.job(10.2, 2, 2) == 1
    assert course.app(10.5, 1, 0) == 0, "it has not left"
    course.job(10.9, 2, 1)
    assert course.app(11.0, 1, 0) == 1
    course.app(11.1, 1, 1, starting=1)
    course.app(12.5, 1, 1)


def test_a_device_from_training_to_serving() -> None:
    course = Course()
    a_rise(course)
    (event,) = course.told()
    assert (event.holder, event.node) == ("app/c", None), "it is no event of a node"
    assert event.facts is not None
    assert (event.facts["from"], event.facts["node"]) == ("job/x", "worker-1")
    assert event.facts["seconds"] == pytest.approx(2.5)
    assert event.facts["parts"] == {"decision": 0.2, "way_out": 0.7, "grant": 0.1, "start": 1.5}
    assert event.reason == (
        "a replica of app/c came on worker-1 2.5 s after the want: 0.2 s until job/x was told to leave,"
        " 0.7 s until job/x had left, 0.1 s until the grant, 1.5 s until it answers"
    )
    document = event.as_json()
    assert document["before"] == document["after"] == {"worker-1": 1}
    assert document["facts"]["parts"]["start"] == 1.5


def test_and_back() -> None:
    course = Course()
    a_rise(course)
    course.told()
    assert course.app(20.0, 0, 1) == 0
    assert course.job(20.3, 2, 1) == 1, "it has not left"
    course.app(20.5, 0, 0)
    assert course.job(20.6, 2, 1) == 2
    course.job(20.7, 2, 2, starting=1)
    course.job(25.0, 2, 2)
    (event,) = course.told()
    assert event.facts is not None
    assert event.facts["from"] == "app/c"
    assert event.facts["parts"] == {"way_out": 0.5, "grant": 0.1, "start": 4.4}
    assert "until it steps" in event.reason


def test_who_stays_after_all_leaves_later_as_if_it_had_not_been_asked_before() -> None:
    course = Course()
    a_rise(course)
    course.told()
    course.app(20.0, 0, 1)
    course.job(20.3, 2, 1)
    assert course.app(20.5, 1, 1) == 1, "it had not left"
    course.app(21.0, 1, 1)
    assert course.told() == [], "what runs on was handed over to nobody"
    course.app(24.0, 0, 1)
    course.app(24.5, 0, 0)
    assert course.job(24.6, 2, 1) == 2
    course.job(26.0, 2, 2)
    (event,) = course.told()
    assert event.facts is not None
    assert event.facts["parts"] == {"way_out": 0.5, "grant": 0.1, "start": 1.4}


def test_a_free_device_takes_no_way_out() -> None:
    course = Course()
    assert course.app(5.0, 1, 0) == 1
    course.app(5.5, 1, 1)
    assert course.told() == [], "nobody has handed it over"
    found = explain(course.ledger.snapshot(6.0), "app/c")
    assert found.hand_over is not None
    assert (found.hand_over["from"], found.hand_over["parts"]) == (None, {"grant": 0.0, "start": 0.5})
    assert "after the want" not in found.text


def test_what_ran_before_it_was_heard_of_was_not_handed_over() -> None:
    course = Course()
    course.job(0.0, 2, 2)
    course.job(1.0, 2, 2, starting=1)
    course.job(2.0, 2, 2)
    assert course.told() == [], "nor is a rank that is started again"


def test_a_unit_that_never_ran_is_told_of_never() -> None:
    course = Course()
    course.job(0.0, 2, 2)
    course.app(1.0, 1, 0)
    course.job(1.5, 2, 2)
    course.job(2.0, 2, 1)
    assert course.app(2.1, 1, 0) == 1
    assert course.app(2.2, 0, 0) == 0
    assert course.job(3.0, 2, 1) == 2
    course.ledger.release("job/x")
    course.job(4.0, 2, 2)
    assert course.told() == []


def test_a_giver_that_ends_its_lease_has_left() -> None:
    course = Course()
    course.job(0.0, 2, 2)
    course.app(1.0, 1, 0)
    course.job(1.5, 2, 2)
    course.ledger.release("job/x")
    assert course.app(3.0, 1, 0) == 1
    course.app(4.0, 1, 1)
    (event,) = course.told()
    assert event.facts is not None
    assert event.facts["parts"] == {"decision": 0.5, "way_out": 1.5, "grant": 0.0, "start": 1.0}


def test_explain_tells_how_the_last_one_came() -> None:
    course = Course()
    a_rise(course)
    snapshot = course.ledger.snapshot(20.0)
    found = explain(snapshot, "app/c")
    assert "; 8 s ago a replica of c came on worker-1 2.5 s after the want: 0.2 s until x" in found.text
    assert found.hand_over is not None
    assert found.hand_over["at_s_ago"] == pytest.approx(7.5)
    assert found.as_json()["hand_over"]["parts"]["way_out"] == 0.7
    course.app(700.0, 1, 1)
    assert "after the want" not in explain(course.ledger.snapshot(700.0), "app/c").text


def test_a_place_that_was_left_for_nothing_is_not_what_the_next_who_wants_one_waited_for() -> None:
    course = Course(3.0)
    assert course.job(0.0, 3, 0) == 3
    course.job(1.0, 3, 3)
    course.told()
    assert course.app(10.0, 2, 0) == 0
    assert course.job(10.1, 3, 3) == 1
    course.app(10.2, 1, 0)  # it wants one alone now
    course.job(10.9, 3, 1)  # both have left
    assert course.app(11.0, 1, 0) == 1
    course.app(11.1, 1, 1)
    assert course.job(11.2, 3, 1) == 2
    course.job(11.5, 3, 2)
    course.told()
    assert course.app(15.0, 2, 1) == 1
    assert course.job(15.1, 3, 2) == 1
    course.job(15.8, 3, 1)
    assert course.app(16.0, 2, 1) == 2
    course.app(16.5, 2, 2)
    (event,) = course.told()
    assert event.facts is not None
    assert event.facts["parts"] == {"decision": 0.1, "way_out": 0.7, "grant": 0.2, "start": 0.5}
