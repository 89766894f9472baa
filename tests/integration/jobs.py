"""Real jobs on a real cluster, as a person runs them: a config file and the command line."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clusters import LiveCluster, caller_environment, shoal_command
from tests.train_jobs.ranks import TINY, merged

TIMEOUT_S = 150.0

JOB: dict[str, Any] = merged(
    TINY,
    {
        "parallel": {"strategy": "fsdp"},
        "workers": {"min": 2, "max": 2},
        "steps": 300,
        "checkpoint": {"every_steps": 50},
        "evaluate": {"every_steps": 100},
    },
)
"""A job whose steps take milliseconds, with enough of them that a fault can hit in the middle."""


@dataclass(frozen=True)
class JobFile:
    """A config file with jobs, for a cluster that is up."""

    live: LiveCluster
    path: Path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Run a command of `shoal` and do not wait for it."""
        return subprocess.Popen(
            [*shoal_command(*arguments), "-f", str(self.path)],
            env=caller_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def shoal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `shoal` to its end; the result is not checked."""
        process = self.start(*arguments)
        out, error = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, error)

    def submit(self, name: str, *settings: str) -> Path:
        """Submit a job; returns its directory."""
        done = self.shoal("train", name, "--detach", "--json", *settings)
        assert done.returncode == 0, done.stderr
        return Path(self.live.record.storage) / "jobs" / json.loads(done.stdout)["job"]

    def train(self, name: str, *settings: str) -> tuple[int, dict[str, Any]]:
        """Train to the end; returns the exit code and the result document."""
        done = self.shoal("train", name, "--json", *settings)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)


def job_file(live: LiveCluster, directory: Path, jobs: dict[str, dict[str, Any]]) -> JobFile:
    """A config file in `directory` with these jobs, for the cluster that is up."""
    path = directory / "shoal.yaml"
    cluster = live.config_path.read_text().replace("./storage", live.record.storage)
    path.write_text(f"{cluster}train_jobs: {json.dumps(jobs)}\n")
    return JobFile(live, path)


def stop_what_runs(jobs: JobFile) -> None:
    """Stop the jobs that a failed test has left: the next ones need what they hold."""
    for run in (Path(jobs.live.record.storage) / "jobs").glob("*"):
        if not events(run, "finished"):
            jobs.shoal("stop", run.name)


def events(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    return [event for event in _documents(run / "events.jsonl") if kind in (None, event["kind"])]


def metrics(run: Path) -> list[dict[str, Any]]:
    return _documents(run / "metrics.jsonl")


def _documents(path: Path) -> list[dict[str, Any]]:
    """The lines of a log that are whole: the last may be in the middle of being written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run: Path) -> dict[int, float]:
    """The loss of every step; of a step that ran again, that of its last run."""
    return {line["step"]: line["loss"] for line in metrics(run)}


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Wait until a condition holds; returns what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:.0f} s"
        time.sleep(0.02)
    return value


def finished(run: Path, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Wait for the end of a job; returns its last event."""
    return wait_until(lambda: next(iter(events(run, "finished")), None), f"the end of {run.name}", timeout_s)
