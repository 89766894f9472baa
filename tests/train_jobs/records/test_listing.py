"""What the files of jobs tell of them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cluster.files.storage import Storage
from train_jobs.records.listing import account_of, find_job, list_jobs, result_of


def write_run(root: Path, job: str, ago_s: float, ends: bool) -> None:
    """A run that was submitted a while ago: a lease after 10 s, the first step after 20 s, four of 5 s."""
    began = datetime.now(UTC) - timedelta(seconds=ago_s)

    def at(seconds: float) -> str:
        return (began + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")

    events: list[dict[str, Any]] = [
        {"time": at(0), "kind": "submitted", "name": "lm", "steps": 4, "submission_id": job},
        {"time": at(10), "kind": "leased", "workers": 1, "nodes": ["n"]},
        {"time": at(20), "kind": "started", "attempt": 1, "world_size": 1, "step": 0},
    ]
    steps = [
        {"time": at(20 + 5 * step), "attempt": 1, "step": step, "loss": 1.0 / step, "step_s": 5.0}
        for step in range(1, 5)
    ]
    if ends:
        events.append({"time": at(42), "kind": "finished", "status": "succeeded", "step": 4, "exit_code": 0})
    run = root / "jobs" / job
    run.mkdir(parents=True)
    for name, lines in (("events.jsonl", events), ("metrics.jsonl", steps)):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_every_job_is_listed_with_where_its_time_went_until_now_if_it_runs(tmp_path: Path) -> None:
    write_run(tmp_path, "lm-1", ago_s=1000, ends=True)
    write_run(tmp_path, "lm-2", ago_s=100, ends=False)
    write_run(tmp_path, "lm-3", ago_s=90, ends=False)
    ended, runs, gone = list_jobs(Storage(str(tmp_path)), {"lm-2": "RUNNING", "lm-3": "FAILED"})
    assert (ended["wall_s"], ended["queued_s"], ended["useful_s"]) == (32.0, 10.0, 20.0)
    assert (ended["goodput"], ended["goodput_from_submission"]) == (20 / 32, round(20 / 42, 4))
    assert ended["losses_s"] == {"starting": 10.0, "other": 2.0}
    assert runs["wall_s"] == pytest.approx(90, abs=30)
    assert runs["goodput"] < gone["goodput"] == round(20 / 30, 4), (
        "one goes on, the other has lost nothing more"
    )
    assert (gone["status"], gone["losses_s"]) == ("failed", {"starting": 10.0})
    storage = Storage(str(tmp_path))
    assert {key: result_of(storage, "lm-1")[key] for key in ("goodput", "losses_s", "step")} == {
        "goodput": ended["goodput"],
        "losses_s": ended["losses_s"],
        "step": 4,
    }
    assert account_of(storage, "lm-1", runs=False).as_json()["wall_s"] == 32.0


def test_of_several_of_a_name_the_newest_is_meant_or_the_newest_that_runs(tmp_path: Path) -> None:
    for job, ago_s in (("lm-1", 300), ("lm-2", 200), ("lm-3", 100)):
        write_run(tmp_path, job, ago_s=ago_s, ends=False)
    storage = Storage(str(tmp_path))

    def running(*jobs: str) -> str:
        return find_job(storage, "lm", prefer=lambda summary: summary.job in jobs)

    assert find_job(storage, "lm") == "lm-3"
    assert (running("lm-1", "lm-2"), running("lm-3", "lm-1"), running()) == ("lm-2", "lm-3", "lm-3")
    assert find_job(storage, "lm-1", prefer=lambda summary: summary.job == "lm-2") == "lm-1"
