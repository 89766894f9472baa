"""Which model of a job becomes a version: each once, and none is taken for another."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.files.storage import Storage
from tests.object_store import reached, uri
from tests.small_disk import only_small_files
from train_jobs.driver.publication import Publication
from train_jobs.records.run_log import RunSummary
from train_jobs.records.workspace import Workspace
from train_jobs.spec import EXPORT, EXPORT_FACTS

JOB = "tiny-20260101-000000-abcd"


class Run:
    """A run's directory, and what its driver does at the end of an attempt."""

    def __init__(self, tmp_path: Path, **config: Any) -> None:
        self.storage = Storage(tmp_path / "storage")
        self.config = TrainJobConfig.model_validate({"publish": "tiny", **config})
        self.workspace = Workspace(self.storage.child("jobs", JOB))
        self.run = self.workspace.directory

    def export(self, text: str, name: str | None = None, step: int = 300) -> None:
        """What a rank leaves; a script leaves no facts."""
        (self.run / EXPORT).mkdir(parents=True, exist_ok=True)
        (self.run / EXPORT / "config.json").write_text(text)
        if name is not None:
            facts = {"export": name, "step": step, "evaluation": {"step": step, "loss": 0.5}}
            (self.run / EXPORT_FACTS).write_text(json.dumps(facts))

    def publish(self, step: int = 0) -> tuple[str, bool]:
        summary = RunSummary(JOB, step=step, evaluation={"step": 300, "loss": 0.7})
        version, is_new = Publication(JOB, self.config, self.storage, self.workspace).publish(summary)
        return version.reference, is_new

    def end(self) -> None:
        shutil.rmtree(self.run / EXPORT)
        (self.run / EXPORT_FACTS).unlink()


def of_script(tmp_path: Path) -> Run:
    return Run(tmp_path, task="script", script="train.py")


def test_a_model_is_published_once_however_often_that_is_tried(tmp_path: Path) -> None:
    for name, run in (("task", Run(tmp_path / "task")), ("script", of_script(tmp_path / "script"))):
        run.export("{}", "first" if name == "task" else None)
        assert [run.publish(), run.publish()] == [("tiny@1", True), ("tiny@1", False)]


def test_what_a_script_left_when_it_ran_again_is_another_model(tmp_path: Path) -> None:
    run = of_script(tmp_path)
    run.export("first")
    assert run.publish() == ("tiny@1", True)
    run.end()
    assert run.publish() == ("tiny@1", False), "it has not run again"
    run.export("second")
    assert run.publish() == ("tiny@2", True)
    assert (Path(tmp_path) / "storage/models/tiny/2/config.json").read_text() == "second"


def test_another_model_of_the_same_step_is_another_version(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.export("first", "first")
    assert run.publish() == ("tiny@1", True)
    run.export("begun anew", "second")
    assert run.publish() == ("tiny@2", True)
    run.export("first", "first")
    assert run.publish() == ("tiny@1", False)


def test_the_evaluation_is_that_of_its_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.export("{}", "first")
    run.publish()
    facts = json.loads((tmp_path / "storage/models/tiny/1/shoal.json").read_text())
    assert (facts["job"], facts["step"], facts["evaluation"]["loss"]) == (JOB, 300, 0.5)


@pytest.mark.parametrize("config", [{}, {"task": "script", "script": "train.py"}])
def test_where_nothing_was_left_that_is_said(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="no model to publish as tiny: the job has left none"):
        Run(tmp_path, **config).publish()
    empty = Run(tmp_path, **config)
    (empty.run / EXPORT).mkdir(parents=True)
    with pytest.raises(RequestError, match="no model to publish as tiny: the job has left none"):
        empty.publish()


def test_in_an_object_store_a_model_does_not_come_by_the_disk_of_the_driver(tmp_path: Path) -> None:
    config = TrainJobConfig.model_validate({"publish": "tiny"})
    weights = os.urandom(3_000_000)
    files = {"config.json": b"{}", "model-1.safetensors": weights, "model-2.safetensors": weights[::-1]}
    with reached() as port:
        storage = Storage(uri(port, "cluster"))
        workspace = Workspace(storage.child("jobs", JOB))
        facts = {"export": "first", "step": 300, "evaluation": None}
        publication = Publication(JOB, config, storage, workspace)
        with pytest.raises(RequestError, match="the job has left none"):
            publication.publish(RunSummary(JOB))
        for name, data in files.items():
            workspace.storage.write_bytes(f"{EXPORT}/{name}", data)
        workspace.storage.write_bytes(EXPORT_FACTS, json.dumps(facts).encode())
        with pytest.raises(RequestError, match="the job has left none"):
            publication.publish(RunSummary(JOB))  # not all of it is there
        workspace.declare(EXPORT)
        with only_small_files(1_000_000):
            version, is_new = publication.publish(RunSummary(JOB))
        assert (version.reference, is_new) == ("tiny@1", True)
        published = storage.child("models", "tiny", "1")
        assert published.files() == [*files, "shoal.json"]
        assert all(published.read_bytes(name) == data for name, data in files.items())
        assert [path.name for path in workspace.directory.iterdir() if not path.name.startswith(".")] == []
        workspace.clear()
