"""What is said of a job that does not come as far as it is waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ShoalError
from cluster.files.storage import Storage
from infra.lab.bench.job_watch import JobWatch
from train_jobs.records.run_log import EVENTS, METRICS


def written(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_job_that_does_not_step_as_it_should_is_told_of_with_what_it_did_last(tmp_path: Path) -> None:
    written(tmp_path / f"{METRICS}.jsonl", {"step": 1, "world_size": 1}, {"step": 2, "world_size": 2})
    began = [{"kind": f"old-{number}"} for number in range(3)]
    failed = {"kind": "failed", "reason": "somebody uses the devices who has no lease"}
    written(
        tmp_path / f"{EVENTS}.jsonl",
        *began,
        {"kind": "submitted"},
        {"kind": "leased"},
        failed,
        {"kind": "started"},
    )
    watch = JobWatch(Storage(str(tmp_path)), timeout_s=0.2)
    watch.until_workers(2)
    with pytest.raises(ShoalError) as told:
        watch.until_workers(3)
    assert "did not step with 3 workers within 0 s: its newest step had 2 workers" in str(told.value)
    events = (
        "its newest events: old-2, submitted, leased, failed (somebody uses the devices who has no lease)"
    )
    assert f"{events}, started" in str(told.value)
