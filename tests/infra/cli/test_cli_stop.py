"""`shoal stop` over an object store: what it reads there while it waits."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path

import fsspec
import pytest
from pyarrow import fs

from cluster.files import line_writer
from cluster.files.storage import Storage
from infra.cli import train as module
from infra.cli.main import call
from train_jobs.records.run_log import RunLog

JOB = "lm-20260101-000000-abcd"
LOOKS = 30


class StoodIn:
    """Ray's job API: the job ends by itself some looks after it was asked to, saying so or not."""

    def __init__(self, run: Storage, says: bool) -> None:
        self.log = RunLog(run)
        self.stopped: list[str] = []
        self.looks = 0
        self._says = says

    def statuses(self) -> dict[str, str]:
        return {JOB: "RUNNING"}

    def stop(self, submission_id: str) -> None:
        self.stopped.append(submission_id)

    def status(self, submission_id: str) -> str:
        self.looks += 1
        if self._says:
            last = (
                {"kind": "finished", "status": "stopped"} if self.looks == LOOKS else {"kind": "checkpointed"}
            )
            self.log.event("t", step=self.looks, **last)
            assert self.log.wait(60.0)
        return "STOPPED" if self.looks == LOOKS else "RUNNING"


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    storage = Storage(f"/bucket/{uuid.uuid4().hex}", filesystem=memory)
    monkeypatch.setattr(module, "storage_of", lambda loaded: storage)
    monkeypatch.setattr(module, "_STOP_LOOK_S", 0.0)
    monkeypatch.setattr(line_writer, "PART_BYTES", 2000)
    (tmp_path / "shoal.yaml").write_text("cluster: {storage: ./kept}\n")
    monkeypatch.chdir(tmp_path)
    return storage


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was read."""
    found: Counter[str] = Counter()
    whole = Storage.read_bytes

    def counted(storage: Storage, path: str, start: int = 0) -> bytes:
        data = whole(storage, path, start)
        found[path] += 1
        return data

    monkeypatch.setattr(Storage, "read_bytes", counted)
    return found


@pytest.mark.parametrize("says", [True, False], ids=["the driver says so", "its driver is killed"])
def test_it_reads_what_is_new_while_it_waits_and_never_the_metrics(
    says: bool,
    storage: Storage,
    read: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    submissions = StoodIn(storage.child("jobs", JOB), says)
    monkeypatch.setattr(module, "submissions_of", lambda loaded: submissions)
    log = submissions.log
    log.event("t", "submitted", name="lm", steps=100, submission_id=JOB)
    for step in range(200):
        log.event("t", "checkpointed", step=0)
        log.metric({"attempt": 1, "step": step, "loss": 1.0})
        assert step % 20 or log.wait(60.0)
    assert log.wait(60.0)
    before = storage.child("jobs", JOB).list("events")
    assert len(before) > 3
    assert call(["stop", "lm"]) == 0
    assert submissions.stopped == [JOB]
    assert f"{JOB} was stopped at step {LOOKS if says else 0}" in capsys.readouterr().out
    assert submissions.looks == LOOKS + (not says)
    assert not [path for path in read if path.startswith("metrics")]
    assert max(read[f"events/{name}"] for name in before[:-1]) == 2, "by its name, and to follow it"
    assert read.total() <= 2 * len(before) + LOOKS + 3
