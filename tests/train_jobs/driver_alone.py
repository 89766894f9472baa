"""A driver without a cluster: what it decides and leaves behind is real, and its group is the test's."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.config.sections.train import TrainJobConfig
from cluster.files.storage import Storage
from train_jobs.driver.driver import Driver
from train_jobs.group.standing_by import StandingBy
from train_jobs.records.run_log import RunLog, now, read_events, summarize
from train_jobs.records.workspace import Workspace


def do_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drivers ask actors that are plain objects, and leave the signals of this process alone."""
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


class DriverAlone(Driver):
    """Tests say what `_train` does; its events go to the run's log at once."""

    def __init__(self, config: TrainJobConfig, storage: Storage) -> None:
        self.job, self.config, self.storage = "own-1", config, storage
        self.run_storage = storage.child("jobs", self.job)
        self.workspace = Workspace(self.run_storage)
        self.run_storage.write_bytes("config.yaml", b"")  # by whoever submits the job
        self.single = SimpleNamespace(kill=lambda: None)
        self.lease = SimpleNamespace(release=lambda: None, preview=lambda: (), least=1)
        self._standing_by = StandingBy()
        self.control = SimpleNamespace(last_step=SimpleNamespace(remote=lambda: 0))
        self.stop_asked = threading.Event()
        self.attempt = summarize(self.job, self.run_storage).attempts

    def told(self, kind: str) -> list[dict[str, Any]]:
        """The job's events of a kind."""
        return [event for event in read_events(self.run_storage) if event["kind"] == kind]

    def _event(self, kind: str, **facts: Any) -> None:
        log = RunLog(self.run_storage)
        log.event(now(), kind, **{fact: value for fact, value in facts.items() if value is not None})
        log.close()
