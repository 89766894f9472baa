"""The table of jobs says at every moment what their files say, and reads none of them twice."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from pathlib import Path

import fsspec
import pytest
from pyarrow import fs

from cluster.files.storage import Storage
from tests.train_jobs.ranks import tiny_job
from train_jobs.driver.submission import record_submission
from train_jobs.records.job_table import JobTable
from train_jobs.records.listing import list_jobs
from train_jobs.records.run_log import RunLog, now


@pytest.fixture(params=["a mounted path", "an object store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "a mounted path":
        return Storage(tmp_path / "storage")
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    return Storage(f"/bucket/{uuid.uuid4().hex}", filesystem=memory)


class Life:
    """Jobs that are submitted, step, end, and are gone on with, in any order."""

    def __init__(self, storage: Storage, seed: int) -> None:
        self.storage, self.random = storage, random.Random(seed)
        self.statuses: dict[str, str] = {}
        self.steps: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()

    def happen(self) -> None:
        """One thing more."""
        if not self.steps or self.random.random() < 0.1:
            job = f"lm-{len(self.steps)}"
            self.steps[job] = 0
            self.submit(job)
            return
        job = self.random.choice(sorted(self.steps))
        if self.statuses[job] != "RUNNING":
            self.submit(job)
            return
        log = RunLog(self.storage.child("jobs", job))
        what = self.random.random()
        if what < 0.8:
            self.steps[job] += 1
            log.metric({"attempt": self.attempts[job], "step": self.steps[job], "loss": 1.0, "step_s": 0.1})
        elif what < 0.9:
            log.event(now(), "finished", status="stopped", step=self.steps[job], exit_code=1)
            self.statuses[job] = "STOPPED"
        else:
            self.statuses[job] = "FAILED"  # without a word
        log.close()

    def submit(self, job: str) -> None:
        record_submission(self.storage, job, "lm", tiny_job(Path("c.parquet")), job)
        self.attempts[job] += 1
        log = RunLog(self.storage.child("jobs", job))
        log.event(now(), "started", attempt=self.attempts[job], world_size=2, step=self.steps[job])
        log.close()
        self.statuses[job] = "RUNNING"


@pytest.mark.parametrize("seed", range(4))
def test_it_says_what_the_files_say(seed: int, storage: Storage) -> None:
    life, table = Life(storage, seed), JobTable(storage)
    assert table.rows({}) == []
    for _ in range(60):
        life.happen()
        if life.random.random() < 0.5:
            fresh = list_jobs(storage, life.statuses)
            known = table.rows(life.statuses)
            for one, other in zip(known, fresh, strict=True):
                of_time = {
                    key for key in one if key.startswith("goodput") or key.endswith("_s")
                }  # which passes
                assert {k: v for k, v in one.items() if k not in of_time} == {
                    k: v for k, v in other.items() if k not in of_time
                }
                if life.statuses[other["job"]] != "RUNNING":
                    assert one == other


def test_nothing_is_read_twice_and_of_what_has_ended_only_the_row_is_kept(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()
    whole = Storage.read_bytes

    def counted(storage: Storage, path: str, start: int = 0) -> bytes:
        data = whole(storage, path, start)
        read[storage.location] += len(data)
        return data

    monkeypatch.setattr(Storage, "read_bytes", counted)
    for job in ("lm-1", "lm-2"):
        record_submission(storage, job, "lm", tiny_job(Path("c.parquet")), job)
        log = RunLog(storage.child("jobs", job))
        for step in range(1, 51):
            log.metric({"attempt": 1, "step": step, "loss": 1.0, "step_s": 0.1})
        log.event(now(), "finished", status="succeeded", step=50, exit_code=0)
        log.close()
    table = JobTable(storage)
    first = table.rows({})
    once = read.total()
    assert once > 5_000
    assert table.rows({}) == first
    assert read.total() == once
    log = RunLog(storage.child("jobs", "lm-2"))
    log.event(now(), "submitted", name="lm", steps=60, submission_id="again")
    log.close()
    (one, two) = table.rows({"again": "RUNNING"})
    assert (one["status"], two["status"]) == ("succeeded", "submitted")
    assert read[storage.child("jobs", "lm-1").location] < once / 2 + 100
    assert [len(history._metrics) for history in table._jobs.values()] == [0, 50]


def test_a_job_whose_files_were_removed_is_not_there(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "storage")
    record_submission(storage, "lm-1", "lm", tiny_job(Path("c.parquet")), "lm-1")
    table = JobTable(storage)
    assert len(table.rows({})) == 1
    storage.delete_dir("jobs/lm-1")
    assert table.rows({}) == []
