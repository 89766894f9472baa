"""Every step is logged, in order, whenever the actor that writes the log is killed: on a Ray of its own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.object_store import reached, uri

STEPS = 15
"""From one kill to the next."""
PROGRAM = """
import json, os, random, signal, sys, time
import ray
from cluster.actors import NAMESPACE
from cluster.files.line_reader import read_lines
from cluster.files.storage import Storage
from train_jobs.records.control import JobControl, control_name, find_control
from train_jobs.records.metric_sender import MetricSender

name, run = sys.argv[1:3]
kills, steps = int(sys.argv[3]), int(sys.argv[4])
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)

class Control(JobControl):
    def pid(self):
        return os.getpid()

options = {"num_cpus": 0, "max_concurrency": 1, "max_restarts": -1, "max_task_retries": -1}
kind = ray.remote(**options)(Control)
there = kind.options(name=control_name(name), namespace=NAMESPACE).remote(run)
control, sender, draw = find_control(name), MetricSender(), random.Random(7)
step = 0
for kill in range(kills):
    pid, last, at = ray.get(there.pid.remote()), step + steps, step + draw.randint(3, 10)
    while step < last:
        step += 1
        sender.send(control, {"attempt": 1, "step": step}, 60)
        if step == at:
            time.sleep(draw.choice([0, 0.001, 0.003]))
            os.kill(pid, signal.SIGKILL)
        time.sleep(draw.choice([0, 0.001, 0.01]))
os.kill(ray.get(there.pid.remote()), signal.SIGKILL)
sender.send(control, {"attempt": 1, "step": step + 1}, 60)
sender.finish(60)  # who ends now sends nothing again
storage = Storage(run)
at_finish = [line["step"] for line in read_lines(storage, "metrics")]
control.call("event", "finished", timeout_s=60, named={"status": "succeeded"})
with open(sys.argv[5], "w") as told:
    json.dump([at_finish, [line["step"] for line in read_lines(storage, "metrics")]], told)
"""


@pytest.fixture(params=["a directory", "an object store"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where the run lies."""
    if request.param == "a directory":
        (tmp_path / "run").mkdir()
        yield str(tmp_path / "run")
    else:
        with reached() as port:
            yield uri(port, "run")


def test_no_step_is_missing_where_the_writer_of_the_log_is_killed(run: str, tmp_path: Path) -> None:
    appends = "://" not in run
    kills = 10 if appends else 2
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(tmp_path)  # Ray keeps a token there
    told = tmp_path / "told"
    program = [sys.executable, "-c", PROGRAM, "job", run, str(kills), str(STEPS), str(told)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=150, env=environment)
    assert ended.returncode == 0, ended.stderr
    at_finish, steps = json.loads(told.read_text())
    expected = list(range(1, kills * STEPS + 2))
    # A line may stand there twice whose answer died with the writer, or came before it was written.
    assert list(dict.fromkeys(steps)) == expected
    if appends:
        assert [step for step, _ in itertools.groupby(steps)] == expected
        assert at_finish == steps, "it was on its way when the writer was killed"
