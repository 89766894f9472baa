"""What a fault did to a job is read out of the job's logs, and what must not be in them is found."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from infra.lab.faults.fault_course import (
    longest_gap_s,
    resumption,
    resumption_beyond,
    seconds,
    wrong_losses,
    wrong_steps,
)


def line(step: int, attempt: int = 1, at_s: float = 0.0, loss: float = 0.0) -> dict[str, Any]:
    time = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    return {"step": step, "attempt": attempt, "time": time, "loss": loss}


def steps(first: int, last: int, attempt: int = 1) -> list[dict[str, Any]]:
    return [line(step, attempt) for step in range(first, last + 1)]


def test_a_job_that_goes_back_says_from_where_and_what_it_does_again() -> None:
    lines = [*steps(1, 37), line(26, 2, at_s=12.5), line(27, 2, at_s=13.0)]
    found = resumption(lines, 2)
    assert found is not None
    assert (found.time, found.from_step, found.repeated, found.lost) == (12.5, 25, 12, 0)
    assert resumption(steps(1, 37), 2) is None


def test_a_job_that_goes_on_with_its_peers_repeats_nothing() -> None:
    found = resumption_beyond(steps(1, 40), 31)
    assert found is not None
    assert (found.from_step, found.repeated, found.lost) == (31, 0, 0)
    assert resumption_beyond(steps(1, 31), 31) is None


def test_steps_that_stand_nowhere_are_lost() -> None:
    found = resumption([*steps(1, 10), line(14, 2)], 2)
    assert found is not None
    assert (found.lost, found.repeated) == (3, 0)


def test_the_longest_gap_begins_with_the_last_step_before_the_fault() -> None:
    lines = [line(1, at_s=0), line(2, at_s=9), line(3, at_s=10), line(4, at_s=14), line(5, at_s=15)]
    assert longest_gap_s(lines, since=11.0) == 4.0
    assert longest_gap_s(lines, since=0.0) == 9.0
    assert longest_gap_s(lines[:1], since=0.0) == 0.0
    assert seconds(lines[3]) == 14.0


def test_a_job_that_went_back_to_what_it_had_saved_is_right() -> None:
    lines = [*steps(1, 37), *steps(26, 60, attempt=2), *steps(51, 70, attempt=4)]
    assert wrong_steps(lines, checkpoints=[25, 50]) == []
    assert wrong_steps([*steps(1, 9), *steps(1, 9, attempt=2)], checkpoints=[]) == [], "it began anew"


def test_an_attempt_that_went_back_by_itself_says_so() -> None:
    lines = [*steps(1, 37), *steps(26, 40)]
    assert wrong_steps(lines, checkpoints=[25], went_back=[25]) == []
    assert wrong_steps(lines, checkpoints=[25]) == ["step 26 follows step 37 in attempt 1"]
    (nowhere,) = wrong_steps(lines, checkpoints=[], went_back=[25])
    assert "where nothing was saved" in nowhere


def test_missing_repeated_and_invented_steps_are_named() -> None:
    assert wrong_steps([*steps(1, 5), *steps(7, 9)], []) == [
        "steps [6] were never done",
        "step 7 follows step 5 in attempt 1",
    ]
    assert wrong_steps([*steps(1, 5), line(5)], []) == ["step 5 follows step 5 in attempt 1"]
    (sentence,) = wrong_steps([*steps(1, 37), *steps(31, 40, attempt=2)], [25])
    assert sentence == "attempt 2 goes on from step 30, where nothing was saved"


def test_losses_are_held_to_the_last_bit_or_to_a_tolerance() -> None:
    undisturbed = {1: 0.5, 2: 0.25}
    other = 0.25 * (1 + 2**-52)
    lines = [line(1, loss=0.5), line(2, loss=other), line(2, attempt=2, loss=0.25)]
    (sentence,) = wrong_losses(lines, undisturbed, tolerance=0.0)
    assert sentence.startswith("1 losses are not those of an undisturbed run, the first of step 2: ")
    assert wrong_losses(lines, undisturbed, tolerance=1e-9) == []
    assert wrong_losses([line(1, loss=float("nan"))], undisturbed, tolerance=1.0)
