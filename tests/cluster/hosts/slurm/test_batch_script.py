"""What sbatch is given, from the config alone."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.cluster import ClusterConfig
from cluster.hosts.slurm.batch_script import batch_script

FILE = Path("/home/ann/it's mine/shoal.yaml")


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/home/ann/of state")


def script_of(**slurm: Any) -> str:
    cluster = ClusterConfig.model_validate({"name": "lab", "provider": "slurm", "slurm": slurm})
    return batch_script(cluster, FILE)


def options_of(script: str) -> list[str]:
    return [word for line in script.splitlines() if line[:8] == "#SBATCH " for word in shlex.split(line[8:])]


def test_what_is_asked_for() -> None:
    script = script_of(
        nodes=4,
        gpus_per_node=8,
        cpus_per_node=96,
        partition="gpu",
        account="acme",
        time="2-00:00:00",
        notice_s=300,
        extra=["--qos=high", "--comment=two words"],
    )
    assert options_of(script) == [
        "--job-name=shoal-lab",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--cpus-per-task=96",
        "--gpus-per-node=8",
        "--partition=gpu",
        "--account=acme",
        "--time=2-00:00:00",
        "--signal=B:TERM@300",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        "--output=/home/ann/of state/shoal/lab/slurm-%j.log",
        "--qos=high",
        "--comment=two words",
    ]
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    *_, last = script.splitlines()
    assert shlex.split(last) == ["exec", sys.executable, "-m", "infra.slurm_job", "-f", str(FILE)]


def test_what_is_not_said_is_left_to_the_site() -> None:
    options = options_of(script_of())
    assert {"--exclusive", "--nodes=1"} < set(options)
    assert not [
        each for each in options if each.startswith(("--part", "--acc", "--time", "--gpus", "--cpus"))
    ]


def test_a_job_may_stay_out_of_the_queue() -> None:
    assert "--no-requeue" in options_of(script_of(requeue=False))


def test_another_python_may_run_it() -> None:
    assert (
        script_of(python="/opt/shoal/bin/python").splitlines()[-1].startswith("exec /opt/shoal/bin/python -m")
    )


def test_the_nodes_keep_their_state_where_we_do() -> None:
    assert "export XDG_STATE_HOME='/home/ann/of state'" in script_of().splitlines()
