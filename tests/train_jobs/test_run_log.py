"""The logs of a run are written whole, and what their events say of it."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.storage import Storage, StorageError
from train_jobs.run_log import RunLog, RunSummary, read_events, read_metrics


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


def test_lines_that_the_storage_did_not_take_are_written_with_the_next(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    log = RunLog(Storage(run))
    log.event("t1", "submitted")
    run.rename(away)
    for step in (1, 2):
        with pytest.raises(StorageError, match="not there any more"):
            log.metric({"step": step})
    assert not run.exists(), "it must not be made anew where the file system is away"
    away.rename(run)
    log.metric({"step": 3})
    assert [line["step"] for line in read_metrics(Storage(run))] == [1, 2, 3]
    assert [event["kind"] for event in read_events(Storage(run))] == ["submitted"]


def test_a_disk_without_room_gets_no_half_line(tmp_path: Path) -> None:
    log = RunLog(Storage(tmp_path))
    log.metric({"step": 1})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with room_for(size + 5), pytest.raises(StorageError, match="append to"):
        log.metric({"step": 2})
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    log.metric({"step": 3})
    assert [line["step"] for line in read_metrics(Storage(tmp_path))] == [1, 2, 3]


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """Files of this process may become no larger: a write beyond that is cut short, as on a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
