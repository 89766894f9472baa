"""Every step is logged, in order, whenever the actor that writes the log is killed: on a Ray of its own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

KILLS, STEPS = 10, 15
PROGRAM = """
import os, random, signal, sys, time
import ray
from cluster.actors import NAMESPACE
from cluster.files.storage import Storage
from train_jobs.records.control import JobControl, control_name, find_control
from train_jobs.records.metric_sender import MetricSender
from train_jobs.records.run_log import read_metrics

KILLS, STEPS = int(sys.argv[3]), int(sys.argv[4])
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)

class Control(JobControl):
    def pid(self):
        return os.getpid()

options = {"num_cpus": 0, "max_concurrency": 1, "max_restarts": -1, "max_task_retries": -1}
kind = ray.remote(**options)(Control)
name, run = sys.argv[1:3]
there = kind.options(name=control_name(name), namespace=NAMESPACE).remote(run)
control, sender, draw = find_control(name), MetricSender(), random.Random(7)
step = 0
for kill in range(KILLS):
    pid, last, at = ray.get(there.pid.remote()), step + STEPS, step + draw.randint(3, 10)
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
last = read_metrics(Storage(run))[-1]["step"]
print()  # after what Ray has printed
print(last)
"""


def test_no_step_is_missing_where_the_writer_of_the_log_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(tmp_path)  # Ray keeps a token there
    program = [sys.executable, "-c", PROGRAM, "job", str(run), str(KILLS), str(STEPS)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=150, env=environment)
    assert ended.returncode == 0, ended.stderr
    last = KILLS * STEPS + 1
    logged = [int(line) for line in ended.stdout.splitlines() if line.isdecimal()]
    assert logged == [last], "it was on its way when the writer was killed"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    # A line may stand there twice whose answer died with the writer.
    assert [step for step, _ in itertools.groupby(steps)] == list(range(1, last + 1))
