"""What the events of a run say of it."""

from __future__ import annotations

from typing import Any

from train_jobs.run_log import RunSummary


def summary(*events: dict[str, Any]) -> RunSummary:
    found = RunSummary("job")
    for event in events:
        found.apply(event)
    return found


def started(group: str | None, step: int, workers: int, attempt: int = 1) -> dict[str, Any]:
    event = {"kind": "started", "attempt": attempt, "step": step, "world_size": 1, "workers": workers}
    return event if group is None else {**event, "group": group}


def resized(world_size: int) -> dict[str, Any]:
    return {"kind": "resized", "world_size": world_size}


def test_groups_that_start_together_are_one_attempt_of_all_their_workers() -> None:
    found = summary(started("1-0", 0, 2), started("1-1", 0, 2))
    assert (found.status, found.attempts, found.workers, found.world_sizes) == ("running", 1, 2, [2])


def test_groups_that_come_and_go_change_the_workers_and_not_the_attempt() -> None:
    first = (started("1-0", 0, 2), started("1-1", 0, 2))
    found = summary(*first, resized(3), started("1-2", 9, 3), resized(1))
    assert (found.attempts, found.workers, found.world_sizes, found.step) == (1, 1, [2, 3, 1], 9)


def test_a_job_goes_on_when_one_of_several_groups_fails() -> None:
    first = (started("1-0", 0, 2), started("1-1", 0, 2))
    found = summary(*first, resized(1), {"kind": "failed", "goes_on": True})
    assert (found.status, found.workers) == ("running", 1)
    found = summary(*first, {"kind": "failed"})
    assert (found.status, found.workers) == ("recovering", 0)


def test_every_attempt_of_one_group_is_listed() -> None:
    failed = {"kind": "failed"}
    found = summary(started(None, 0, 2), failed, started(None, 5, 2, attempt=2))
    assert (found.attempts, found.world_sizes, found.step) == (2, [2, 2], 5)
