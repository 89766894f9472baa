"""Preemption by Slurm: a job of a higher partition takes the nodes; what ran goes on by itself afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.files.storage import Storage
from tests import waiting
from tests.slurm_hosts import APP, JOB, SlurmUser, needs_slurm, slurm_site_of
from train_jobs.records.run_log import read_all_metrics

pytestmark = [needs_slurm, pytest.mark.slow, pytest.mark.timeout(900)]

GRACE_S = 60
"""Of the sites with a cluster."""
SHORT_GRACE_S, SHORT_KILL_WAIT_S = 12, 5
SOON_S = 5.0
"""Within so long of the other job's submission a signal belongs to the preemption's begin."""
ASKING = """
import http.client, json, sys, time
from urllib.parse import urlsplit
url, key, words = urlsplit(sys.argv[1]), sys.argv[2], {"model": "chat", "prompt": "import os", "stream": True}
while True:
    began, status = time.time(), 0
    try:
        line = http.client.HTTPConnection(url.netloc, timeout=60)
        line.connect()
    except OSError:
        outcome = "no connection"
    else:
        try:
            headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
            line.request("POST", url.path + "/completions", json.dumps({**words, "max_tokens": 64}), headers)
            answer = line.getresponse()
            status, body = answer.status, answer.read()
            whole = body.rstrip().endswith(b"[DONE]") and b'"error"' not in body
            outcome = "whole" if status == 200 and whole else f"refused {status}" if status >= 400 else "cut"
        except (OSError, http.client.HTTPException) as error:
            outcome = f"cut: {error!r}"
    print(json.dumps({"began": began, "ended": time.time(), "outcome": outcome}), flush=True)
    time.sleep(0.05)
"""
"""Streams answers of the app one after the other, and says of each how it ended."""
HEARING = """#!/bin/sh
trap 'echo batch $(date +%s.%N) >> heard' TERM
srun sh -c 'trap "echo step \\$(date +%s.%N) >> heard" TERM; echo runs > runs; while :; do sleep 0.2; done' &
while :; do sleep 0.2; done
"""
"""A batch job that writes down when its script and its step are told to leave, and goes on."""
WAIT_S = 240.0
wait_for = partial(waiting.wait_for, timeout_s=WAIT_S)


TAKES = ("--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
"""What the job asks for that takes the nodes."""


@contextmanager
def a_site(directory: Path, low: str, **settings: str) -> Iterator[tuple[SlurmUser, SlurmUser]]:
    """Two users of two nodes: who has the partition of low priority, and who comes before."""
    directory.chmod(0o755)
    preemption = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", **settings}
    partitions = {"low": f"PriorityTier=1 {low}", "high": "PriorityTier=10 PreemptMode=OFF"}
    with slurm_site_of(
        directory, nodes=2, users=("ann", "bob"), settings=preemption, partitions=partitions
    ) as site:
        yield SlurmUser(site, directory / "homes"), SlurmUser(site, directory / "homes", "bob")


class Asking:
    """Somebody who asks the app all the time."""

    def __init__(self, user: SlurmUser, key: str) -> None:
        exports = user.slurm(*user.command("env"))
        (base,) = [line.partition("=")[2] for line in exports.splitlines() if "SHOAL_BASE_URL" in line]
        self._file = user.home / "answers.jsonl"
        with self._file.open("wb") as output:
            self._process: subprocess.Popen[str] = user.site.login.start(
                sys.executable, "-c", ASKING, base.strip("'\""), key, user=user.name, output=output
            )

    def outcomes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file.read_text().splitlines() if line.endswith("}")]

    def whole_after(self, moment: float) -> list[float]:
        """When answers that were asked for after it were whole."""
        return [
            each["ended"] for each in self.outcomes() if each["outcome"] == "whole" and each["began"] > moment
        ]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)


def state_of(user: SlurmUser, number: str) -> str:
    return user.slurm("squeue", "--noheader", "--format=%T", f"--jobs={number}").strip()


def told(user: SlurmUser) -> str:
    return user.state().joinpath("told.jsonl").read_text()


USER_SIGNAL = {"SlurmctldParameters": "preempt_send_user_signal"}
TOLD_FIRST = [
    pytest.param(f"GraceTime={SHORT_GRACE_S}", {}, {"step"}, id="grace"),
    pytest.param(f"GraceTime={SHORT_GRACE_S}", USER_SIGNAL, {"batch"}, id="grace-user-signal"),
    pytest.param("", {}, {"batch", "step"}, id="no-grace"),
]


@pytest.mark.parametrize(("low", "settings", "first"), TOLD_FIRST)
def test_whom_slurm_tells_when_a_preemption_begins(
    tmp_path: Path, low: str, settings: dict[str, str], first: set[str]
) -> None:
    with a_site(tmp_path, low, **settings, KillWait=str(SHORT_KILL_WAIT_S)) as (user, other):
        options = ("--partition=low", "--nodes=2", "--exclusive", "--requeue", "--signal=B:TERM@60")
        done = user.run("sbatch", "--parsable", *options, "--time=60", "--output=said", given=HEARING)
        assert done.returncode == 0, done.stderr
        number = done.stdout.strip()
        wait_for(lambda: (user.home / "runs").exists(), "its step does not run")
        began = time.time()
        other.slurm("sbatch", *TAKES, "--wrap=sleep 1")
        wait_for(lambda: state_of(user, number) == "PENDING", "it is not requeued")
        heard = [line.split() for line in (user.home / "heard").read_text().splitlines()]
        told_s = {who: [float(at) - began for by, at in heard if by == who] for who in ("batch", "step")}
        print(f"{low} {settings}: gone after {time.time() - began:.1f} s; told after {told_s} s")
        assert {who for who, after in told_s.items() if min(after) < SOON_S} == first


@pytest.mark.parametrize("settings", [{}, USER_SIGNAL], ids=["grace", "grace-user-signal"])
def test_a_preemption_is_a_notice_to_leave(tmp_path: Path, settings: dict[str, str]) -> None:
    with a_site(tmp_path, f"GraceTime={GRACE_S}", **settings) as (user, other):
        slurm = {"nodes": 2, "cpus_per_node": 2, "partition": "low"}
        user.write(
            {"slurm": slurm, "gateway": {"keys": "keys.yaml"}},
            train_jobs={"lm": JOB, "short": {**JOB, "steps": 20}},
            serve_apps=APP,
        )
        key = user.slurm(*user.command("key", "ann")).strip()
        done = user.shoal("up")
        assert done.returncode == 0, done.stderr
        assert user.shoal("train", "short", timeout_s=240).returncode == 0
        done = user.shoal("serve", timeout_s=240)
        assert done.returncode == 0, done.stderr
        number = user.slurm("squeue", "--noheader", "--format=%i").strip()
        job = str(user.document("train", "lm", "--detach")["job"])
        storage = Storage(str(user.home / "storage")).child("jobs", job)

        def steps() -> list[int]:
            return [line["step"] for line in read_all_metrics(storage)]

        wait_for(lambda: len(steps()) >= 30, "the job does no steps")
        asking = Asking(user, key)
        try:
            wait_for(lambda: len(asking.whole_after(0)) >= 10, "the app does not answer")
            began = time.time()
            taker = other.slurm("sbatch", *TAKES, "--wrap=sleep 900").strip()
            wait_for(lambda: "there is notice to leave" in told(user), "nothing tells the head to leave")
            print(f"notice after {time.time() - began:.1f} s")
            wait_for(lambda: state_of(other, taker) == "RUNNING", "the other job does not start")
            taken_s = time.time() - began
            saved = len(steps())
            (last, *_) = asking.whole_after(0)[::-1]
            print(f"the other job runs after {taken_s:.1f} s; last answer after {last - began:.1f} s")
            print(f"{Counter(each['outcome'] for each in asking.outcomes())}")
            assert taken_s < GRACE_S, "it has not left by itself within its notice"
            wait_for(lambda: state_of(user, number) == "PENDING", "it is not in the queue again")
            # Without the two minutes that Slurm has a requeued job wait.
            user.slurm("scontrol", "update", f"JobId={number}", "StartTime=now+5")
            assert steps() == list(range(1, saved + 1))
            ended = time.time()
            other.slurm("scancel", taker)
            wait_for(lambda: len(steps()) >= saved + 20, "the job does not go on")
            print(f"steps {time.time() - ended:.1f} s after the other job's end")
            wait_for(lambda: asking.whole_after(ended), "the app does not come back")
            print(f"answers {asking.whole_after(ended)[0] - ended:.1f} s after the other job's end")
        finally:
            asking.stop()
        assert not [each for each in asking.outcomes() if each["outcome"].startswith("cut")]
        assert user.shoal("stop", job).returncode == 0
        assert steps() == list(range(1, len(steps()) + 1)), "a step was lost, or done twice"
        assert user.document("down")["stopped"]
