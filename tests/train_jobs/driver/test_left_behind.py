"""A stop is not kept waiting by files that are on their way, nor an end by a storage that is away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.files.backend import StorageError
from cluster.files.storage import Storage
from tests.object_store import CREDENTIALS, late, object_store, uri
from tests.train_jobs.driver_alone import DriverAlone, do_without_ray
from tests.train_jobs.ranks import tiny_job
from train_jobs.checkpoint.store import CheckpointStore
from train_jobs.driver import driver
from train_jobs.driver.left_behind import unless_stopped
from train_jobs.records.workspace import Workspace

PLACES = ("_is_to_train", "_publish", "update_work", "declare")
"""Where a driver works on files."""


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the end of a test: what it let hang goes on."""
    event = threading.Event()
    yield event
    event.set()


class TrainsAtOnce(DriverAlone):
    def _train(self) -> None:
        self.trained = True


@pytest.mark.parametrize("hangs", PLACES)
def test_a_job_is_stopped_while_its_files_are_on_their_way(
    hangs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    do_without_ray(monkeypatch)
    config = tiny_job(Path("c.parquet"))
    if hangs == "update_work":
        config = TrainJobConfig.model_validate({"task": "script", "script": "train.py"})
    monkeypatch.setattr(driver, "JobData", lambda *_: SimpleNamespace(prepare=lambda: True, units=()))
    job = TrainsAtOnce(config, Storage(tmp_path / "storage"))

    def hang(*_: Any) -> None:
        job.stop_asked.set()
        released.wait(60)

    owner: Any = driver if hangs == "update_work" else job if hangs.startswith("_") else Workspace
    monkeypatch.setattr(owner, hangs, hang)
    begun = time.monotonic()
    assert job.run() == 1
    assert time.monotonic() - begun < 5
    (end,) = job.told("finished")
    assert (end["status"], end.get("error")) == ("stopped", None)
    assert hasattr(job, "trained") == (hangs == "_publish")


def _no_storage(*_: Any) -> None:
    raise StorageError("cannot list checkpoints: connection refused")


@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("does", [(CheckpointStore, "newest"), (Workspace, "forget")])
def test_a_job_ends_although_the_storage_is_away(
    does: tuple[type, str],
    hangs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    released: threading.Event,
    capsys: pytest.CaptureFixture[str],
) -> None:
    do_without_ray(monkeypatch)
    monkeypatch.setattr(driver, "_END_S", 0.5)
    job = TrainsAtOnce(tiny_job(Path("c.parquet")), Storage(tmp_path / "storage"))
    job.stop_asked.set()
    monkeypatch.setattr(*does, (lambda *_: released.wait(60)) if hangs else _no_storage)
    begun = time.monotonic()
    assert job.run() == 1
    assert time.monotonic() - begun < 5
    (end,) = job.told("finished")
    assert (end["status"], end["step"]) == ("stopped", 0)
    assert "not all could be done at the end: " in capsys.readouterr().out


def test_what_the_work_raises_is_raised_where_it_is_waited_for() -> None:
    def full() -> None:
        raise StorageError("cannot write data: no space left on device")

    with pytest.raises(StorageError, match="no space left"):
        unless_stopped(full, lambda: False, "files are copied")


def test_what_cannot_be_deleted_at_the_end_keeps_nothing_else_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do_without_ray(monkeypatch)
    job = TrainsAtOnce(tiny_job(Path("c.parquet")), Storage(tmp_path / "storage"))
    forgotten: list[str] = []

    def forget(_: Workspace, name: str) -> None:
        forgotten.append(name)
        raise StorageError("connection refused")

    monkeypatch.setattr(Workspace, "forget", forget)
    assert job._finish("succeeded", 0) == 0
    assert forgotten == ["ray_train", "export"]


PUTS = """
import signal, sys, threading
from cluster.files.storage import Storage
from train_jobs.driver.data_errors import StoppedError
from train_jobs.driver.left_behind import end_process, unless_stopped
from train_jobs.records.workspace import Workspace

asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
workspace = Workspace(Storage(sys.argv[1]))
data = workspace.directory / "data"
data.mkdir(exist_ok=True)
(data / "tokens").write_bytes(b"x" * 1000)
print("puts", flush=True)
try:
    unless_stopped(lambda: workspace.put("data"), asked.is_set, "the job's data is put")
except StoppedError as error:
    print(error, flush=True)
    workspace.clear()
    end_process(1)
"""


def test_a_process_that_leaves_an_upload_behind_ends_as_it_would_without(tmp_path: Path) -> None:
    environment = {**os.environ, **CREDENTIALS, "TMPDIR": str(tmp_path)}
    with object_store() as port, late(port, "tokens", 20.0) as (front, asked):
        asked.set()
        command = [sys.executable, "-c", PUTS, uri(front, "jobs/own-1")]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as job:
            assert job.stdout is not None
            assert job.stdout.readline() == "puts\n"
            time.sleep(1.0)  # the upload has begun
            begun = time.monotonic()
            job.send_signal(signal.SIGTERM)
            said, errors = job.communicate(timeout=30)
    assert (job.returncode, said) == (1, "it is stopped while the job's data is put\n"), errors
    assert "Fatal" not in errors
    assert "terminate" not in errors
    assert time.monotonic() - begun < 10, "the store has the file only after 20 s"
