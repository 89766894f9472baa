"""The figures of a measurement, from what was seen of it, by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from infra.lab.bench.asking import FailedRequest, TimedAnswer
from infra.lab.bench.sharing_plan import SharingPlan
from infra.lab.bench.sharing_report import course_table, document, figures, problems, table
from infra.lab.bench.side import FIXED, RAY, SHARING, Side
from tests.infra.lab.bench.logs import APP, JOB, at, lease, node, step, turn
from tests.infra.lab.bench.test_load_course import LOGS, TOKENS

PLAN = SharingPlan(rounds=2)
BROKER = [
    node(0, "n", 4),
    lease(1, "held", JOB, 2, 2, 2),
    lease(2, "held", APP, 1, 1, 1),
    lease(15, "held", JOB, 1, 1, 1),
]
# One step a second of 20 samples with two workers; from 15 s on with one, which does 10.
STEPS = [step(n, n, 2, 20) for n in range(1, 16)] + [step(n, n, 1, 10) for n in range(16, 31)]
ANSWERS = [TimedAnswer(at(n), at(n + 0.1 * (n - 10)), at(n + 1), "r", 5) for n in range(11, 20, 2)]
SIDE = Side(
    span=(at(10), at(20)),
    rounds=[turn(10, 14, 16), turn(16, 18, 20)],
    logs=replace(LOGS, broker=BROKER, metrics=STEPS),
    rates={1: 10.0, 2: 20.0},
    answers=ANSWERS,
    failures=[],
    first_tokens=[],
)


def test_figures_are_of_the_time_from_the_first_rise_to_the_end_of_the_last_fall() -> None:
    found = figures(SIDE)
    assert found["seconds"] == 10
    assert found["samples_per_s"] == pytest.approx((5 * 20 + 5 * 10) / 10)
    assert found["of_ideal"] == pytest.approx(1)
    assert found["requests_per_s"] == pytest.approx(0.5)
    assert found["tokens_per_s"] == pytest.approx(2.5)
    # 0.1, 0.3, 0.5, 0.7 and 0.9 s.
    assert (found["first_token_p50_s"], found["first_token_p99_s"]) == pytest.approx((0.5, 0.9))


def test_idle_is_what_nobody_has_and_replicas_without_a_request() -> None:
    found = figures(SIDE)
    assert found["device_seconds"] == pytest.approx(40)
    assert found["device_seconds_training"] == pytest.approx(2 * 5 + 1 * 5)
    assert found["device_seconds_serving"] == pytest.approx(10)
    assert found["device_seconds_nobody"] == pytest.approx(15)
    assert found["device_seconds_unasked"] == pytest.approx(5)
    assert found["idle"] == pytest.approx(20 / 40)


def test_a_group_that_starts_up_is_missing_from_what_was_granted_and_not_from_what_stepped() -> None:
    granted = [node(0, "n", 4), lease(1, "started", JOB, 0, 2, 0)]
    found = figures(replace(SIDE, logs=replace(SIDE.logs, broker=granted)))
    assert found["of_ideal"] == pytest.approx(1)
    assert found["of_granted"] == pytest.approx(150 / 200)


def test_failures_and_steps_that_are_missing_or_repeated_are_told_in_sentences() -> None:
    assert problems("sharing", SIDE) == []
    wrong = replace(
        SIDE,
        failures=[FailedRequest(at(11), at(12), "503: no room")],
        logs=replace(SIDE.logs, metrics=[*STEPS[:3], *STEPS[4:9], *STEPS[7:]]),
    )
    assert problems("sharing", wrong) == [
        "sharing: 1 of 6 requests failed: 503: no room",
        "sharing: training lost 1 step, the first is 4",
        "sharing: training repeated 2 steps, the first is 8",
    ]
    assert document(PLAN, {SHARING: SIDE, FIXED: wrong})["ok"] is False


def test_the_document_has_every_rounds_parts_their_median_and_the_worst() -> None:
    logs = replace(LOGS, broker=[node(0, "n", 5), *LOGS.broker])
    side = replace(SIDE, rounds=[turn(10, 30, 60)], logs=logs, first_tokens=TOKENS, rates={2: 1.0, 3: 1.0})
    found = json.loads(json.dumps(document(PLAN, {SHARING: side, FIXED: SIDE}), allow_nan=False))
    (only,) = found["rounds"]
    assert only["first_token_s"] == found["first_token"]["total"]["median_s"] == 13
    assert sum(each["median_s"] for each in found["first_token"]["parts"].values()) == pytest.approx(13)
    assert found["training_back"]["parts"]["group start"] == {
        "median_s": 10.5,
        "worst_s": 10.5,
        "rounds": 1,
    }
    assert found["ok"] is True
    shown = {words.strip(): values for words, *values in course_table(found)}
    assert shown["model load"] == ["3.00 s", "3.00 s"]
    assert {words: values for words, *values in table(found)}["requests failed"] == ["0", "0"]


def test_what_rays_own_way_loses_is_a_figure_and_no_failure_of_the_measurement() -> None:
    lost = replace(SIDE, failures=[FailedRequest(at(11), at(12), "timed out")], rates={}, serving_s=8.0)
    found = document(PLAN, {SHARING: SIDE, FIXED: SIDE, RAY: lost})
    assert (found["ok"], found["sides"]["ray"]["requests_failed"]) == (True, 1)
    shown = {words: values for words, *values in table(found)}
    assert shown["requests failed"] == ["0", "0", "1"]
    assert shown["  of the ideal for the workers granted"][2] == "–"
    # Two workers step for five seconds and one for five more; there are four devices.
    assert [shown[words][2] for words in ("  training", "  serving", "  nobody's")] == ["15", "8", "17"]


def test_without_an_answer_there_is_no_time_to_first_token() -> None:
    found = document(PLAN, {SHARING: replace(SIDE, answers=[]), FIXED: SIDE})
    assert {words: values for words, *values in table(found)}["first token, p50"] == ["–", "500 ms"]
