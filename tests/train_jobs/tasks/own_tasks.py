"""Trains tasks as users write them, one after the other in one rank, and tells how each of them ended."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.ranks import assemble, reports, run_program
from train_jobs.driver.failures import FailureClass, class_of
from train_jobs.errors import bases_of


@dataclass(frozen=True)
class Outcome:
    """How a job ended, as its driver would hear it.

    Attributes:
        steps: that it logged.
        error: what the rank raised; None where it trained to its end and left the model.
    """

    steps: int
    error: str | None = None
    failure_class: FailureClass | None = None


def train_all(directory: Path, modules: dict[str, str], **changes: Any) -> dict[str, Outcome]:
    """Train a class `Task` of each of these modules; each has its run's directory by its name."""
    for name, module in modules.items():
        (directory / name).mkdir()
        (directory / f"task_{name}.py").write_text(module)
    run_program(_train_each, directory / "ranks", 1, str(directory), json.dumps([*modules]), changes)
    return {name: _read(directory / name / "outcome.json") for name in modules}


def _train_each(directory: str, names: str, changes: dict[str, Any]) -> None:
    """The rank."""
    sys.path.insert(0, directory)
    for name in json.loads(names):
        run = Path(directory, name)
        job = {"task": f"task_{name}:Task", "steps": 3, "batch": {"global": 8, "micro": 4}, **changes}
        found = {"error": None, "failure_class": None}
        try:
            assembly = assemble(TrainJobConfig.model_validate(job), run)
            assembly.begin()
            assert assembly.loop.run() == "finished"
            assembly.export()
        except Exception as error:  # noqa: BLE001  (whatever it is, the test judges it)
            kind = class_of(type(error).__name__, str(error), bases_of(error))
            found = {"error": str(error), "failure_class": kind}
        (run / "outcome.json").write_text(json.dumps({"steps": len(steps(run)), **found}))


def steps(run: Path) -> list[dict[str, Any]]:
    """The lines that the steps of a run have logged."""
    logged = reports(run) if (run / "reports.jsonl").exists() else []
    return [line for line in logged if "kind" not in line]


def _read(path: Path) -> Outcome:
    found = json.loads(path.read_text())
    kind = found.pop("failure_class")
    return Outcome(**found, failure_class=None if kind is None else FailureClass(kind))
