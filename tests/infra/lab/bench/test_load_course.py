"""What took how long in a rise and a fall of load, read out of logs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.lab.bench.load_course import (
    TO_FIRST_TOKEN,
    TO_STEP,
    Logs,
    between,
    fall,
    lost_and_repeated,
    parts,
    rise,
)
from tests.infra.lab.bench.logs import APP, JOB, at, lease, ready, resized, step, turn, wanted

ROUND = turn(10, 30, 60)
TOKENS = [(at(9), "old"), (at(12), "old"), (at(24.5), "new"), (at(24), "new"), (at(26), "old")]
LOGS = Logs(
    broker=[
        lease(0, "started", APP, 0, 1, 0),
        lease(0.5, "held", APP, 1, 1, 1),
        lease(1, "started", JOB, 0, 3, 0),
        lease(2, "held", JOB, 3, 3, 3),
        # The lease is told to shrink, and has the device for a while yet.
        lease(11.5, "gave_way", JOB, 3, 2, 3),
        lease(13, "held", JOB, 2, 2, 2),
        lease(13.25, "grew", APP, 1, 2, 1),
        lease(15, "held", APP, 2, 2, 2),
        lease(33, "asked_less", APP, 2, 1, 2),
        lease(35, "held", APP, 1, 1, 1),
        lease(35.5, "grew", JOB, 2, 3, 2),
        lease(36, "held", JOB, 3, 3, 3),
    ],
    app=[
        wanted(1, 0, 1),
        ready(3, "old", 2, 2.5),
        wanted(11, 1, 2),
        ready(23, "new", 19, 22),
        wanted(33, 2, 1),
    ],
    job=[resized(5, joined=1), resized(12, left=1), resized(45, joined=1)],
    metrics=[
        step(9, 1, 3),
        step(11, 2, 3),
        step(12.5, 3, 2),
        step(29, 4, 2),
        step(44, 5, 2),
        step(46, 6, 3),
        step(47, 7, 3),
    ],
    job_holder=JOB,
    app_holder=APP,
)


def test_the_way_to_the_first_token_is_the_sum_of_its_parts() -> None:
    course = rise(LOGS, ROUND, TOKENS)
    assert parts(course) == pytest.approx(
        {
            "want": 1,
            "decision": 0.5,
            "step boundary": 0.5,
            "way out": 1,
            "grant": 0.25,
            "placement": 5.75,
            "model load": 3,
            "first token": 2,
        }
    )
    assert between(course, "want", "first token") == pytest.approx(13)
    assert list(parts(course)) == ["want", *TO_FIRST_TOKEN]


def test_the_way_back_is_the_sum_of_its_parts() -> None:
    course = fall(LOGS, ROUND)
    assert parts(course) == pytest.approx({"want": 3, "release": 2, "grant": 0.5, "group start": 10.5})
    assert between(course, "want", "group start") == pytest.approx(13)
    assert list(parts(course)) == ["want", *TO_STEP]


def test_a_later_round_is_not_told_of_an_earlier_ones_events() -> None:
    later = [
        lease(71.5, "gave_way", JOB, 3, 2, 3),
        lease(74, "held", JOB, 2, 2, 2),
        lease(74.5, "grew", APP, 1, 2, 1),
    ]
    logs = replace(LOGS, broker=[*LOGS.broker, *later], app=[*LOGS.app, wanted(71, 1, 2)])
    course = rise(logs, turn(70, 90, 100), TOKENS)
    assert course["want"] == at(71)
    assert course["way out"] == at(74)
    assert course["grant"] == at(74.5)
    # No replica has become ready since, so that nobody's token is the first.
    assert (course["placement"], course["first token"]) == (None, None)


def test_what_was_not_logged_has_no_duration() -> None:
    # A device was free: nobody had to give one up.
    logs = replace(LOGS, broker=[event for event in LOGS.broker if event["cause"] != "gave_way"])
    found = parts(rise(logs, ROUND, TOKENS))
    assert (found["decision"], found["step boundary"]) == (None, None)
    assert found["model load"] == pytest.approx(3)
    assert between(rise(logs, ROUND, TOKENS), "want", "first token") == pytest.approx(13)


@pytest.mark.parametrize(
    ("steps", "lost", "repeated"),
    [
        ([], [], []),
        ([1, 2, 3], [], []),
        ([4, 5, 6], [], []),
        ([1, 3, 6], [2, 4, 5], []),
        ([1, 2, 2, 3], [], [2]),
        # Somebody went back to a checkpoint, and one step was never logged.
        ([1, 2, 3, 2, 3, 5], [4], [2, 3]),
    ],
)
def test_steps_that_are_missing_or_stand_twice_are_found(
    steps: list[int], lost: list[int], repeated: list[int]
) -> None:
    assert lost_and_repeated([step(n, number, 2) for n, number in enumerate(steps)]) == (lost, repeated)
