"""The logs of a run are written whole, and what their events say of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cluster.files import line_writer
from cluster.files.backend import StorageError
from cluster.files.storage import Storage
from tests.small_disk import only_small_files
from train_jobs.records.run_log import RunLog, RunSummary, node_of, read_events, read_metrics


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


def test_steps_that_went_wrong_are_counted_and_a_job_that_went_back_stands_there() -> None:
    skipped = {"kind": "step_skipped", "step": 6}
    found = summary(started(None, 0, 2), skipped, skipped, {"kind": "went_back", "step": 9, "to": 4})
    assert (found.skipped, found.went_back, found.step) == (2, 1, 4)


def test_stragglers_are_those_that_are_slow_now() -> None:
    def straggler(rank: int, group: str, kind: str = "straggler") -> dict[str, Any]:
        return {"kind": kind, "rank": rank, "group": group, "node": "n", "times_slower": 2.5, "steps": 12}

    found = summary(
        started("1-0", 0, 2),
        straggler(0, "1-0"),
        straggler(0, "1-1"),
        straggler(0, "1-1"),  # another group has taken over, and says it again
        straggler(0, "1-0", "straggler_over"),
    )
    assert found.stragglers == [{"group": "1-1", "rank": 0, "node": "n", "times_slower": 2.5}]
    found.apply(started("2-0", 5, 2, attempt=2))
    assert found.stragglers == []


def test_a_rank_is_where_its_group_was_last_started() -> None:
    def ranks(*nodes: str) -> dict[str, Any]:
        return {"ranks": [{"rank": rank, "node": node} for rank, node in enumerate(nodes)]}

    events = [
        started(None, 0, 2) | ranks("a", "b"),
        started("1-1", 0, 2) | ranks("c", "d"),
        started(None, 5, 2, attempt=2) | ranks("b", "e"),
    ]
    assert [node_of(rank, None, events) for rank in (0, 1, 2)] == ["b", "e", None]
    assert [node_of(1, group, events) for group in ("1-1", "1-2")] == ["d", None]


def test_lines_that_the_storage_did_not_take_are_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    log = RunLog(Storage(run))
    log.event("t1", "submitted")
    assert log.wait(5.0)
    run.rename(away)
    for step in (1, 2):
        log.metric({"attempt": 1, "step": step})
        assert not log.wait(0.1)
    assert "not there any more" in str(log.trouble)
    assert not run.exists(), "it must not be made anew where the file system is away"
    away.rename(run)
    log.metric({"attempt": 1, "step": 3})
    log.close()
    assert [line["step"] for line in read_metrics(Storage(run))] == [1, 2, 3]
    assert [event["kind"] for event in read_events(Storage(run))] == ["submitted"]


def test_whoever_wants_the_end_written_is_told_at_once_that_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    log = RunLog(Storage(tmp_path))
    log.event("t1", "finished")
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot be written in .*: cannot append to .*events"):
        log.close()
    assert time.monotonic() - began < 10


def test_a_disk_without_room_gets_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_writer, "RETRY_S", 0.01)
    log = RunLog(Storage(tmp_path))
    log.metric({"attempt": 1, "step": 1})
    assert log.wait(5.0)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with only_small_files(size + 5):
        log.metric({"attempt": 1, "step": 2})
        assert not log.wait(0.2)
        assert "append to" in str(log.trouble)
        assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    log.metric({"attempt": 1, "step": 3})
    log.close()
    assert [line["step"] for line in read_metrics(Storage(tmp_path))] == [1, 2, 3]
