"""A checkpoint becomes a model, in a process of its own: `python -m infra.api.export_process`.

The code of a job's task may be the user's, and stays out of the control API.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from train_jobs.records.listing import run_of
from train_jobs.records.run_config import read_run_config


def export(storage: Storage, job: str, step: int | None, folder: Path, directory: Path) -> int:
    """Write the model of a checkpoint; the step.

    Args:
        folder: where a task of the user's lies.

    Raises:
        RequestError, CheckpointError: see `export_checkpoint`.
    """
    _, config = read_run_config(storage, job)
    sys.path.insert(0, str(folder))
    # DeepSpeed, where it is installed, and a task of the user's may print; the result stands alone.
    with contextlib.redirect_stdout(sys.stderr):
        from train_jobs.checkpoint.export import export_checkpoint

        return export_checkpoint(run_of(storage, job), config, step, directory)


def main() -> None:
    """Do what standard input asks; the last line says {"step"}, or {"failed", "request"}."""
    asked = json.load(sys.stdin)
    out, result = sys.stdout, dict[str, Any]()
    folder, directory = Path(asked["folder"]), Path(asked["directory"])
    try:
        storage = Storage(asked["storage"])
        result = {"step": export(storage, asked["job"], asked["step"], folder, directory)}
    except ShoalError as error:
        result = {"failed": str(error), "request": isinstance(error, RequestError)}
    out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
