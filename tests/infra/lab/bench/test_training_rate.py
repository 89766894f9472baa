"""What a job does in a second, and what it would have done with the workers it had."""

from __future__ import annotations

import pytest

from infra.lab.bench.training_rate import done, ideal, longest_pause, rate, stepping, worker_seconds
from tests.infra.lab.bench.logs import at, step

STEPS = [step(1, 1, 3), step(2, 2, 3), step(4, 3, 2), step(6, 4, 2), step(9, 5, 3)]


def test_a_rate_is_between_the_ends_of_steps() -> None:
    # 0.5 s on either side, in which a step was half-way, belong to no step.
    assert rate(STEPS, at(0.5), at(6.5)) == pytest.approx(30 / 5)
    with pytest.raises(ValueError, match="two steps"):
        rate(STEPS, at(1.5), at(3))


def test_samples_count_where_their_step_ended() -> None:
    assert done(STEPS, at(1), at(6)) == 30
    assert done(STEPS, at(6), at(6.5)) == 0


def test_time_belongs_to_the_step_that_ends_next() -> None:
    assert stepping(STEPS, at(1), at(10)) == [
        (at(1), at(2), 3),
        (at(2), at(4), 2),
        (at(4), at(6), 2),
        (at(6), at(9), 3),
        (at(9), at(10), 3),
    ]
    assert worker_seconds(stepping(STEPS, at(0), at(9))) == 3 * 2 + 2 * 4 + 3 * 3


def test_a_step_that_ends_after_the_time_counts_until_its_end() -> None:
    assert stepping(STEPS, at(3), at(5)) == [(at(3), at(4), 2), (at(4), at(5), 2)]


def test_the_ideal_is_the_integral_of_the_undisturbed_rates() -> None:
    rates = {3: 30.0, 2: 25.0}
    spans = [(0.0, 2.0, 3), (2.0, 6.0, 2), (6.0, 9.0, 3)]
    assert ideal(spans, rates) == pytest.approx(30 * 2 + 25 * 4 + 30 * 3)
    # What was not measured counts in proportion to what is nearest; nobody does nothing.
    assert ideal([(0.0, 2.0, 1), (2.0, 3.0, 4), (3.0, 9.0, 0)], rates) == pytest.approx(25 + 40)


def test_a_job_that_keeps_its_rate_reaches_its_ideal() -> None:
    # A step of ten samples takes 1 s with two workers and 0.5 s with four.
    lines = [step(n, n, 2) for n in range(11)] + [step(10 + n / 2, 10 + n, 4) for n in range(1, 21)]
    rates = {2: rate(lines, at(0), at(10)), 4: rate(lines, at(10), at(20))}
    assert rates == pytest.approx({2: 10, 4: 20})
    assert done(lines, at(0), at(20)) == pytest.approx(ideal(stepping(lines, at(0), at(20)), rates))


def test_the_longest_pause_is_between_two_ends() -> None:
    assert longest_pause(STEPS) == pytest.approx(3)
    assert longest_pause(STEPS[:1]) == 0
