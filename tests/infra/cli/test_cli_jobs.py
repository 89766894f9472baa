"""`shoal jobs` and `shoal resume` on the files of runs: what a job does now, and from where it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from infra.cli.main import call
from tests.served_api import RayJobs, control, served, up_here
from tests.train_jobs.ranks import tiny_job, write_corpus
from train_jobs.checkpoint.manifest import Manifest, write_manifest
from train_jobs.driver.submission import record_submission
from train_jobs.records.run_log import RunLog, now
from train_jobs.spec import CHECKPOINTS, command_digest

JOB = "lm-20260101-000000-abcd"


def tell(storage: Storage, *events: dict[str, Any]) -> None:
    log = RunLog(storage.child("jobs", JOB))
    for event in events:
        log.event(now(), **event)
    log.close()


@pytest.fixture
def storage(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Storage:
    (tmp_path / "shoal.yaml").write_text("cluster: {name: lab, storage: ./kept}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_CONFIG", raising=False)
    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path_factory.mktemp("home")))
    return Storage(tmp_path / "kept")


@pytest.fixture
def ray(storage: Storage) -> Iterator[RayJobs]:
    """Ray's job API of a cluster that is up."""
    found = RayJobs()
    lab = control(storage, found)
    with served(lab) as port:
        up_here("lab", lab, port)
        yield found


PREPARING = {"kind": "preparing", "task": "causal_lm", "source": "c.parquet", "pid": 1}
WAITING = {"kind": "waiting", "min": 2, "max": 2}
LEASED = {"kind": "leased", "workers": 2, "nodes": ["n"]}
STARTED = {"kind": "started", "attempt": 1, "world_size": 2, "step": 0}
FAILED = {"kind": "failed", "attempt": 1, "failure_class": "worker", "rank": 0, "reason": "it died"}


@pytest.mark.parametrize(
    ("events", "status", "workers"),
    [
        ([PREPARING], "preparing", 0),
        ([PREPARING, WAITING], "waiting", 0),
        ([PREPARING, WAITING, {**WAITING, "reason": "chat has them"}], "waiting", 0),
        ([PREPARING, WAITING, LEASED], "starting", 2),
        ([PREPARING, WAITING, LEASED, STARTED], "running", 2),
        # Its workers are somebody else's now.
        ([PREPARING, WAITING, LEASED, STARTED, FAILED, WAITING], "waiting", 0),
        # Its data was prepared on workers, and those of the steps are not there yet.
        ([PREPARING, WAITING, LEASED, {**PREPARING, "workers": 2}], "preparing", 2),
        ([PREPARING, WAITING, LEASED, {**PREPARING, "workers": 2}, WAITING], "waiting", 0),
    ],
)
def test_a_job_without_devices_waits_whatever_it_did_before(
    events: list[dict[str, Any]],
    status: str,
    workers: int,
    storage: Storage,
    ray: RayJobs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record_submission(storage, JOB, "lm", tiny_job(Path("c.parquet")), JOB)
    tell(storage, *events)
    ray.known = {JOB: "RUNNING"}
    assert call(["jobs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["status"], row["workers"]) == (status, workers)
    assert call(["jobs"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if JOB in line]
    assert line.split()[:4] == [JOB, status, "0/8", str(workers)]


ENDED = {"kind": "finished", "status": "stopped", "step": 4, "exit_code": 1}
FROM_4 = {"kind": "started", "attempt": 2, "world_size": 2, "step": 4}
DONE = {"kind": "finished", "status": "succeeded", "step": 8, "exit_code": 0}


@pytest.mark.parametrize(
    ("checkpoints", "said"),
    [([2, 4], "goes on from step 4"), ([], "begins at step 0: there is no checkpoint")],
)
def test_resume_says_first_where_it_goes_on_and_tells_nothing_of_the_past_again(
    checkpoints: list[int],
    said: str,
    storage: Storage,
    ray: RayJobs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record_submission(storage, JOB, "lm", tiny_job(write_corpus(tmp_path / "c.parquet")), JOB)
    tell(storage, PREPARING, WAITING, LEASED, STARTED, FAILED, ENDED)
    for step in checkpoints:
        write_manifest(storage.child("jobs", JOB, CHECKPOINTS), f"step-{step:08d}", Manifest({}))
    storage.child("jobs", JOB, CHECKPOINTS).write_bytes("step-00000006/half", b"")
    ray.then = lambda storage, job: tell(storage, PREPARING, WAITING, LEASED, FROM_4, DONE)
    assert call(["resume", "lm", "--set", "steps=9", "--json"]) == 0
    streams = capsys.readouterr()
    lines = streams.err.splitlines()
    assert lines[:2] == ["changed steps: 8 → 9", said]
    assert lines[lines.index(f"submitted {JOB}") + 1 :] == [
        *("reading c.parquet", "waiting for a lease of 2 workers", "leased 2 workers on n; starting"),
        *("attempt 2: 2 workers from step 4 on", "succeeded at step 8"),
    ]
    assert json.loads(streams.out)["status"] == "succeeded"


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        (False, "its script starts again, and goes on from what it has saved"),
        (True, "its script has succeeded: what is left is to publish the model"),
    ],
)
def test_resume_of_a_script_says_what_is_left_to_do_and_shows_only_what_is_printed_now(
    trained: bool,
    said: str,
    storage: Storage,
    ray: RayJobs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.bin").write_text("")
    (tmp_path / ".gitignore").write_text("data\n")
    config = TrainJobConfig.model_validate({"task": "script", "script": "train.py"})
    record_submission(storage, JOB, "lm", config, JOB)
    preparing = {"kind": "preparing", "task": "script"}
    before = [{"kind": "trained", "command": command_digest(config)}] if trained else []
    tell(storage, preparing, LEASED, STARTED, *before, ENDED)
    for attempt in (1, 2):
        log = tmp_path / "kept" / "jobs" / JOB / "logs" / f"attempt-{attempt}" / "rank-0.log"
        log.parent.mkdir(parents=True)
        log.write_text("of the past\n" * (attempt == 1))
    ray.then = lambda storage, job: tell(storage, preparing, LEASED, FROM_4, DONE)
    assert call(["resume", "lm", "--json"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == said
    assert any(line.startswith("3 files travel, ") for line in lines)
    assert "left out by .gitignore: data" in lines
    assert "of the past" not in lines
