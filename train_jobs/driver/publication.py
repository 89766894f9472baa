"""The finished model of a job becomes a version of its name, once, however often that is tried."""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.files.backend import MissingError
from cluster.files.storage import Storage
from cluster.models.registry import Registry, Version
from train_jobs.records.run_log import RunSummary
from train_jobs.records.workspace import Workspace
from train_jobs.spec import EXPORT, EXPORT_FACTS


class Publication:
    """What one job has to publish.

    Which model lies there is told by what lies with it (`EXPORT_FACTS`), not by the log: an object store
    takes that some seconds late. A rank writes it with the model; what a script leaves is named here.

    Args:
        config: it has a `publish`.
    """

    def __init__(self, job: str, config: TrainJobConfig, storage: Storage, workspace: Workspace) -> None:
        assert config.publish is not None, "the job publishes"
        self.job = job
        self.name = config.publish
        self.config = config
        self.registry = Registry(storage)
        self.workspace = workspace

    def publish(self, summary: RunSummary) -> tuple[Version, bool]:
        """The version of what the job has left, and whether it was made now.

        Raises:
            RequestError: there is no model.
            StorageError: the storage cannot be read or written.
        """
        earlier = [each for each in self.registry.versions(self.name) if each.job == self.job]
        facts = self._facts(summary)
        if facts is None and self.config.task == "script" and earlier:
            # It has not run again, and what it had left was deleted when this was made.
            return earlier[-1], False
        if facts is None:
            raise RequestError(f"there is no model to publish as {self.name}: the job has left none")
        for version in earlier:
            if version.facts.get("export") == facts["export"]:
                return version, False
        step, last = facts["step"], summary.evaluation or {}
        version = self.registry.publish(
            self.name,
            self.workspace.storage.child(EXPORT),
            {
                "job": self.job,
                "step": step,
                # A checkpoint that could not be saved, or its note, is no reason to forget an evaluation.
                "evaluation": facts["evaluation"] or (last if last.get("step") == step else None),
                "config_digest": hashlib.sha256(self.config.model_dump_json().encode()).hexdigest(),
                "export": facts["export"],
            },
        )
        return version, True

    def _facts(self, summary: RunSummary) -> dict[str, Any] | None:
        """What is known of the model that lies there; None where there is none."""
        run = self.workspace.storage
        if not self.workspace.has(EXPORT):
            return None
        try:
            facts: dict[str, Any] = json.loads(run.read_bytes(EXPORT_FACTS))
        except MissingError:
            if self.config.task != "script" or not run.files(EXPORT):
                return None
            facts = {"export": uuid.uuid4().hex, "step": summary.step, "evaluation": None}
            run.write_bytes(EXPORT_FACTS, json.dumps(facts).encode())
        return facts
