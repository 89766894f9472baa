"""`config.yaml` of a run: the job as it was resolved, so that it can be read, resumed and repeated."""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML

from cluster.config import TrainJobConfig
from cluster.errors import RequestError
from cluster.storage import Storage

CONFIG = "config.yaml"


def write_run_config(storage: Storage, job: str, name: str, config: TrainJobConfig) -> None:
    """Write the job as a config file of its own: `train_jobs: {NAME: …}`."""
    document = {"train_jobs": {name: config.model_dump(mode="json", by_alias=True)}}
    text = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(document, text)
    storage.child("jobs", job).write_bytes(CONFIG, text.getvalue().encode())


def read_run_config(storage: Storage, job: str) -> tuple[str, TrainJobConfig]:
    """Name and config of a job.

    Raises:
        RequestError: the job has no config, so that it never was submitted.
    """
    run = storage.child("jobs", job)
    if not run.exists(CONFIG):
        raise RequestError(f"job {job!r} has no {CONFIG} under {run.location}")
    document: dict[str, Any] = YAML(typ="safe", pure=True).load(run.read_bytes(CONFIG).decode())
    ((name, values),) = document["train_jobs"].items()
    return name, TrainJobConfig.model_validate(values)
