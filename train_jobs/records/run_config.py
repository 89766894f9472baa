"""`config.yaml` of a run: the job as it was resolved, so that it can be read, resumed and repeated."""

from __future__ import annotations

import io
import json
from typing import Any

from ruamel.yaml import YAML

from cluster.config.loader import RUN_FILE
from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.files.storage import Storage


def write_run_config(storage: Storage, job: str, name: str, config: TrainJobConfig) -> None:
    """Write the job as a config file of its own: `train_jobs: {NAME: …}`."""
    document = {"train_jobs": {name: config.model_dump(mode="json", by_alias=True)}}
    text = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(document, text)
    storage.child("jobs", job).write_bytes(RUN_FILE, text.getvalue().encode())


def changes(before: TrainJobConfig, after: TrainJobConfig) -> list[str]:
    """What differs between two configs of a job, a line a key: `batch.global: 16 → 32`."""

    def flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in values.items():
            inner = flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
            result |= inner
        return result

    old, new = (flat(each.model_dump(mode="json", by_alias=True)) for each in (before, after))
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key}: {_shown(old.get(key))} → {_shown(new.get(key))}"
        for key in keys
        if old.get(key) != new.get(key)
    ]


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def read_run_config(storage: Storage, job: str) -> tuple[str, TrainJobConfig]:
    """Name and config of a job.

    Raises:
        RequestError: the job has no config, so that it never was submitted.
    """
    run = storage.child("jobs", job)
    if not run.exists(RUN_FILE):
        raise RequestError(f"job {job!r} has no {RUN_FILE} under {run.location}")
    document: dict[str, Any] = YAML(typ="safe", pure=True).load(run.read_bytes(RUN_FILE).decode())
    ((name, values),) = document["train_jobs"].items()
    return name, TrainJobConfig.model_validate(values)
