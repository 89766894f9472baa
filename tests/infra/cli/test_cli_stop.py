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
from infra.api import job_stream, jobs
from infra.cli.main import call
from tests.served_api import RayJobs, control, served, up_here
from train_jobs.records.run_log import RunLog, now

JOB = "lm-20260101-000000-abcd"
LOOKS = 30


class StoodIn(RayJobs):
    """Ray's job API: the job ends by itself some looks after it was asked to, saying so or not."""

    def __init__(self, run: Storage, says: bool) -> None:
        super().__init__()
        self.log = RunLog(run)
        self.looks = 0
        self._says = says

    def statuses(self) -> dict[str, str]:
        return {JOB: "RUNNING" if self.looks < LOOKS else "STOPPED"}

    def status(self, submission_id: str) -> str:
        self.looks += 1
        if self._says and self.looks <= LOOKS:
            last = (
                {"kind": "finished", "status": "stopped"} if self.looks == LOOKS else {"kind": "checkpointed"}
            )
            self.log.event(now(), step=self.looks, **last)
            assert self.log.wait(60.0)
        return "STOPPED" if self.looks >= LOOKS else "RUNNING"


@pytest.fixture
def storage(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Storage:
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    storage = Storage(f"/bucket/{uuid.uuid4().hex}", filesystem=memory)
    monkeypatch.setattr(jobs, "END_LOOK_S", 0.0)
    monkeypatch.setattr(job_stream, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(line_writer, "PART_BYTES", 2000)
    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path_factory.mktemp("home")))
    (tmp_path / "shoal.yaml").write_text("cluster: {name: stopping, storage: ./kept}\n")
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
def test_it_waits_for_the_end_whoever_tells_it(
    says: bool, storage: Storage, read: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    submissions = StoodIn(storage.child("jobs", JOB), says)
    log = submissions.log
    log.event(now(), "submitted", name="lm", steps=100, submission_id=JOB)
    for step in range(200):
        log.event(now(), "checkpointed", step=0)
        log.metric({"attempt": 1, "step": step, "loss": 1.0, "step_s": 0.1})
        assert step % 20 or log.wait(60.0)
    assert log.wait(60.0)
    before = storage.child("jobs", JOB).list("events")
    assert len(before) > 3
    lab = control(storage, submissions)
    with served(lab) as port:
        up_here("stopping", lab, port)
        assert call(["stop", "lm"]) == 0
        assert submissions.stopped == [JOB]
        assert f"{JOB} was stopped at step {LOOKS if says else 0}" in capsys.readouterr().out
        # By its name; to see that it runs; where it stands; as it goes on; and for what came of it.
        assert max(read[f"events/{name}"] for name in before[:-1]) <= 6
        assert call(["stop", "lm"]) == 2
    assert f"{JOB} does not run: it was stopped" in capsys.readouterr().err
