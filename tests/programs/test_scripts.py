"""Programs that know nothing of Shoal, in the style of each library's own guide, run as jobs.

Each runs, is killed in the middle and goes on from its own checkpoint, is stopped and resumed, and fails with
its own exit code; its files and its output are where a person looks for them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.clusters import LiveCluster
from tests.integration.jobs import JobFile, events, finished, job_file, metrics, wait_until

SCRIPTS = Path(__file__).parent / "scripts"
STEPS, SAVE_EVERY, DELAY_S = 80, 20, 0.25
PRINTED = r"step (?P<step>\d+)/(?P<steps>\d+) loss (?P<loss>\S+)"
BAR = r"^\s*\d+%\|.*?\| (?P<step>\d+)/(?P<steps>\d+) \[|'loss': '?(?P<loss>[\d.]+)"
EPOCH = (
    r"(?:Epoch \d+|Training): .*?\| (?P<step>\d+)/(?:(?P<steps>\d+)|\?) \["
    r"(?:.*train_loss=(?P<loss>[\d.]+))?"
)


@dataclass(frozen=True)
class Program:
    """A script, and what it takes to run it as a job.

    Attributes:
        arguments: those of a run of STEPS steps by two workers.
        saved: what of its files lies there at the end, below the checkpoints.
        needs: a package.
    """

    script: str
    arguments: tuple[str | int | float, ...]
    saved: str
    progress: str = PRINTED
    needs: str = "torch"
    exit_at: str = "--exit_at"
    publishes: str | None = None

    def job(self) -> dict[str, Any]:
        return {
            "task": "script",
            "script": self.script,
            "arguments": [*self.arguments, "--delay", DELAY_S],
            "progress": self.progress,
            "publish": self.publishes,
            # As Lightning needs it: as many on one node as on the other.
            "workers": {"min": 2, "max": 2, "per_node": 1},
            "env": {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": 1},
            "recovery": {"hang_timeout_s": 60},
        }


PROGRAMS = {
    "ddp": Program(
        "ddp_snapshot.py",
        ("--snapshot=$SHOAL_CHECKPOINT_DIR/snapshot.pt", "--total_epochs", STEPS),
        "snapshot.pt",
    ),
    "fsdp2": Program(
        "fsdp2_dcp.py",
        ("--checkpoints=$SHOAL_CHECKPOINT_DIR", "--steps", STEPS),
        "step-00080/.metadata",
        exit_at="--exit-at",
    ),
    "trainer": Program(
        "hf_trainer.py",
        (
            *("--output_dir", "$SHOAL_CHECKPOINT_DIR", "--max_steps", STEPS, "--save_steps", SAVE_EVERY),
            *("--logging_steps", 1, "--per_device_train_batch_size", 4, "--report_to", "none"),
            *("--use_cpu", "true", "--ddp_backend", "gloo", "--save_model_to", "$SHOAL_EXPORT_DIR"),
        ),
        "checkpoint-80/model.safetensors",
        BAR,
        "transformers",
        publishes="tuned",
    ),
    "accelerate": Program(
        "accelerate_regression.py",
        ("--output_dir=$SHOAL_CHECKPOINT_DIR", "--resume", "--cpu"),
        "checkpoints/checkpoint_3/model.safetensors",
        needs="accelerate",
    ),
    "lightning": Program(
        "lightning_fit.py",
        ("--output=$SHOAL_CHECKPOINT_DIR", "--devices", 1, "--num_nodes", 2),
        "last.ckpt",
        EPOCH,
        "lightning",
    ),
    "deepspeed": Program(
        "deepspeed_zero.py",
        ("--save_dir=$SHOAL_CHECKPOINT_DIR", "--deepspeed_config", "ds_config.json", "--steps", STEPS),
        "latest",
        needs="deepspeed",
    ),
}

pytestmark = [pytest.mark.programs, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def jobs(running_cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> JobFile:
    directory = tmp_path_factory.mktemp("programs") / "project"
    shutil.copytree(SCRIPTS, directory)
    return job_file(running_cluster, directory, {name: program.job() for name, program in PROGRAMS.items()})


@pytest.fixture(params=PROGRAMS)
def name(request: pytest.FixtureRequest) -> str:
    program = PROGRAMS[request.param]
    if find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed: pip install 'shoal[programs]'")
    return request.param


def step_of(run: Path) -> int:
    return max((line["step"] for line in metrics(run)), default=0)


def end_of(run: Path) -> dict[str, Any]:
    """Its last event; where it failed, what it printed is shown."""
    end = finished(run, 240.0)
    if end["status"] == "failed":
        print(end.get("error"))
    return end


def began_at(run: Path, attempt: int) -> int:
    """The first step that an attempt told of; a bar may begin by drawing its 0."""
    return min(line["step"] for line in metrics(run) if line["attempt"] == attempt and line["step"])


def test_it_is_killed_in_the_middle_and_goes_on_from_its_own_checkpoint(jobs: JobFile, name: str) -> None:
    run = jobs.submit(name)
    wait_until(lambda: step_of(run) >= SAVE_EVERY + 18 or events(run, "finished"), "its steps")
    (started,) = events(run, "started")
    assert len({rank["node"] for rank in started["ranks"]}) == 2
    (script,) = psutil.Process(started["ranks"][1]["pid"]).children()
    os.kill(script.pid, signal.SIGKILL)
    assert end_of(run)["status"] == "succeeded"

    (failure,) = events(run, "failed")
    assert (failure["failure_class"], failure["rank"]) == ("worker", 1)
    assert failure["step"] >= SAVE_EVERY
    assert began_at(run, 2) > SAVE_EVERY, "it began anew"
    assert step_of(run) == STEPS
    assert all(line["loss"] is None or line["loss"] >= 0 for line in metrics(run))
    assert any(line["loss"] is not None for line in metrics(run))
    assert (run / "checkpoints" / PROGRAMS[name].saved).exists()
    assert events(run, "saved")

    for attempt in (1, 2):
        logs = run / "logs" / f"attempt-{attempt}"
        assert {path.name for path in logs.glob("*.log")} == {"rank-0.log", "rank-1.log"}
    (row,) = [row for row in json.loads(jobs.shoal("jobs", "--json").stdout) if row["job"] == run.name]
    assert (row["status"], row["step"], row["steps"], row["attempts"]) == ("succeeded", STEPS, STEPS, 2)
    assert row["goodput"] > 0
    assert f"{STEPS}/{STEPS}" in jobs.shoal("jobs").stdout
    shown = jobs.shoal("logs", run.name, "--rank", "0").stdout
    assert (run / "logs" / "attempt-2" / "rank-0.log").read_text().splitlines()[-1] in shown

    if model := PROGRAMS[name].publishes:
        (published,) = events(run, "published")
        shown = json.loads(jobs.shoal("models", "--json").stdout)
        (version,) = [each for each in shown if each["job"] == run.name]
        assert published["model"] == f"{model}@{version['version']}"
        assert (Path(version["path"]) / "config.json").exists()

    again = jobs.shoal("resume", run.name)
    assert again.returncode == 2
    assert f"the script of {run.name} has succeeded, and is not run again" in again.stderr


def test_it_is_stopped_and_resumed(jobs: JobFile, name: str) -> None:
    run = jobs.submit(name)
    wait_until(lambda: step_of(run) >= SAVE_EVERY + 2 or events(run, "finished"), "its steps")
    stopped = json.loads(jobs.shoal("stop", run.name, "--json").stdout)
    assert stopped["status"] == "stopped"
    assert SAVE_EVERY < stopped["step"] < STEPS
    resumed = jobs.shoal("resume", run.name, "--json")
    result = json.loads(resumed.stdout)
    assert (result["status"], result["step"]) == ("succeeded", STEPS), result
    assert "its script starts again, and goes on from what it has saved" in resumed.stderr
    assert began_at(run, result["attempts"]) > SAVE_EVERY


def test_it_fails_with_an_exit_code_of_its_own(jobs: JobFile, name: str) -> None:
    arguments = [*PROGRAMS[name].job()["arguments"], PROGRAMS[name].exit_at, 3]
    done = jobs.shoal("train", name, "--set", f"arguments={json.dumps(arguments)}")
    assert done.returncode == 1
    assert "the script ended with exit code 3" in done.stderr
    assert "it would be raised again, so the job ends" in done.stderr
    (files,) = [line for line in done.stdout.splitlines() if line.startswith("files: ")]
    run = Path(files.removeprefix("files: "))
    (failure,) = events(run, "failed")
    assert failure["failure_class"] == "code"
    assert f"what its ranks printed: {run}/logs" in done.stdout
