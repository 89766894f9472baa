"""What a job's control logs of what the ranks report."""

from __future__ import annotations

from typing import Any

from train_jobs.records.control import Lines


def line(step: int, attempt: int, loss: float = 1.0) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "loss": loss}


def test_a_step_that_two_groups_did_together_is_logged_once() -> None:
    lines = Lines()
    lines.started(1)
    lines.started(2)
    assert lines.is_new(line(1, 1))
    assert not lines.is_new(line(1, 2))
    assert lines.is_new(line(2, 2))
    assert not lines.is_new(line(2, 1))


def test_a_step_that_is_done_again_is_logged_again_though_its_loss_is_the_same() -> None:
    lines = Lines()
    lines.started(1)
    assert lines.is_new(line(200, 1))
    assert lines.is_new(line(201, 1))
    lines.started(2)  # from a checkpoint of step 200
    assert lines.is_new(line(201, 2))
    assert not lines.is_new(line(201, 1))
    assert lines.is_new(line(202, 2))


def test_a_step_with_another_loss_was_done_again() -> None:
    lines = Lines()
    assert lines.is_new(line(1, 1))
    assert lines.is_new(line(1, 1, loss=0.5))


def test_a_group_that_was_lost_reports_no_step_until_it_takes_part_again() -> None:
    lines = Lines()
    assert lines.is_new(line(52, 1), "older")
    lines.resized(lost=["older"], members=["newer"])
    assert lines.is_new(line(53, 1), "newer"), "both did it, and the older one stood still"
    assert lines.is_new(line(54, 1), "newer")
    assert not lines.is_new(line(53, 1), "older")
    assert lines.is_new(line(55, 1), "newer")
    lines.resized(lost=["newer"], members=["older"])
    assert lines.is_new(line(56, 1), "older"), "it is alone now, as it was before it was lost"
    assert not lines.is_new(line(57, 1), "newer")
