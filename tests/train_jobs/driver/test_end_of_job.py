"""What is left of a job when its driver ends: the exported model, until somebody has it."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from pyarrow import fs

from cluster.config.sections.train import TrainJobConfig
from cluster.files.backend import StorageError
from cluster.files.storage import Storage
from cluster.models.registry import Registry
from tests.train_jobs.driver_alone import DriverAlone, do_without_ray
from tests.train_jobs.ranks import tiny_job
from train_jobs.driver.data_errors import StoppedError
from train_jobs.spec import EXPORT, EXPORT_FACTS, RAY_TRAIN, command_digest

WEIGHTS = f"{EXPORT}/model.safetensors"


class LeavesAModel(DriverAlone):
    """Its group leaves a model and what Ray Train keeps, and then ends, or is stopped."""

    stopped = ran = False

    def _prepare_data(self) -> None: ...

    def _train(self) -> None:
        self.ran = True
        self.run_storage.write_bytes(f"{RAY_TRAIN}/state", b"")
        directory = self.workspace.directory / EXPORT
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "model.safetensors").write_bytes(b"weights")
        self.workspace.put(EXPORT)
        if self.config.task != "script":
            facts = {"export": "first", "step": 8, "evaluation": None}
            self.run_storage.write_bytes(EXPORT_FACTS, json.dumps(facts).encode())
        if self.stopped:
            raise StoppedError("the job was asked to stop")
        if self.config.task == "script":
            self._event("trained", command=command_digest(self.config))


Start = Callable[..., LeavesAModel]


@pytest.fixture(params=["a script", "a task", "a task on an object store"])
def start(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Makes drivers of one job, each on another node where nodes share no directory."""
    do_without_ray(monkeypatch)
    storage = Storage(tmp_path / "storage")
    if request.param == "a task on an object store":
        memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
        storage = Storage(f"/bucket/{uuid.uuid4().hex}", filesystem=memory)

    def make(publish: str | None = "own") -> LeavesAModel:
        monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(dir=tmp_path))
        config = tiny_job(Path("c.parquet"), publish=publish)
        if request.param == "a script":
            values = {"task": "script", "script": "train.py", "publish": publish}
            config = TrainJobConfig.model_validate(values)
        return LeavesAModel(config, storage)

    return make


def is_kept(driver: LeavesAModel) -> tuple[bool, bool]:
    """Whether the model is, and what Ray Train kept."""
    return driver.run_storage.exists(WEIGHTS), driver.run_storage.exists(f"{RAY_TRAIN}/state")


def test_a_model_that_could_not_be_published_is_kept_and_the_job_resumed_publishes_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("cannot write models/own: no space left on device")

    first = start()
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "publish", full)
        assert first.run() == 1
    (end,) = first.told("finished")
    assert (end["status"], end["error"]) == ("failed", "cannot write models/own: no space left on device")
    assert is_kept(first) == (True, False)

    again = start()
    assert again.run() == 0
    assert again.ran is (again.config.task != "script"), "a script that has succeeded is not run again"
    (_, end) = again.told("finished")
    assert (end["status"], end["model"]) == ("succeeded", "own@1")
    assert is_kept(again) == (False, False), "it is in the registry"
    assert Registry(again.storage).resolve("own@latest").job == "own-1"
    assert again.storage.read_bytes("models/own/1/model.safetensors") == b"weights"


def test_an_error_of_ours_while_it_is_published_keeps_it_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("step")

    monkeypatch.setattr(Registry, "publish", broken)
    driver = start()
    with pytest.raises(KeyError):
        driver.run()
    assert driver.told("finished")[-1]["status"] == "failed"
    assert is_kept(driver) == (True, False)


def test_what_nobody_publishes_goes_with_the_end_of_the_job(start: Start) -> None:
    driver = start(publish=None)
    assert driver.run() == 0
    assert is_kept(driver) == (False, False)


def test_a_job_that_is_stopped_keeps_what_it_has_exported(start: Start) -> None:
    driver = start()
    driver.stopped = True
    assert driver.run() == 1
    assert driver.told("finished")[-1]["status"] == "stopped"
    assert is_kept(driver) == (True, False)
