"""Jobs of the user's own code on a real cluster: exactly which samples they see, and scripts as they are."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.clusters import LiveCluster, shoal
from tests.integration.jobs import TIMEOUT_S, JobFile, events, job_file, metrics, wait_until
from tests.train_jobs.rank.test_script import SCRIPTS

SAMPLES, GLOBAL, MICRO, STEPS = 52, 8, 2, 60
SHOWS = """
import os, sys
print(os.environ["PLAIN"], os.environ["SECRET"])
sys.exit(os.environ["SECRET"] != "second")
"""


@pytest.fixture(scope="module")
def jobs(running_cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> JobFile:
    directory = tmp_path_factory.mktemp("tasks")
    (directory / "seen").mkdir()
    shutil.copy(Path(__file__).with_name("sampled_task.py"), directory)
    shutil.copy(SCRIPTS / "plain_ddp.py", directory / "train.py")
    settings = {"samples": SAMPLES, "log": str(directory / "seen"), "pause_s": 0.05}
    sampled = {
        "task": "sampled_task:Task",
        "settings": settings,
        "workers": {"min": 1, "max": 1},
        "batch": {"global": GLOBAL, "micro": MICRO},
        "optimizer": {"learning_rate": 0.1, "name": "sgd"},
        "steps": STEPS,
        "evaluate": {"every_steps": None},
        "checkpoint": {"every_steps": 10},
    }
    script = {
        "task": "script",
        "script": "train.py",
        "arguments": ["--steps", "40", "--pause", "0.05"],
        "workers": {"min": 2, "max": 2},
    }
    (directory / "show.py").write_text(SHOWS)
    shows = {"task": "script", "script": "show.py", "env": {"PLAIN": "plain", "SECRET": None}}
    return job_file(running_cluster, directory, {"sampled": sampled, "script": script, "shows": shows})


def samples_by_step(run: Path, seen: Path) -> dict[int, list[int]]:
    """What every step took, in rank order; of a step that was done again, what it took last."""
    taken: dict[int, list[int]] = {}
    for event in events(run, "started"):
        pids = [each["pid"] for each in sorted(event["ranks"], key=lambda each: each["rank"])]
        lines = [(seen / f"{pid}.jsonl").read_text().splitlines() for pid in pids]
        each = GLOBAL // MICRO // len(pids)
        for index in range(min(len(of_rank) for of_rank in lines) // each):
            mine = [
                json.loads(line) for of_rank in lines for line in of_rank[index * each : (index + 1) * each]
            ]
            taken[event["step"] + index + 1] = [sample for batch in mine for sample in batch]
    return taken


@pytest.mark.slow
def test_a_kill_and_a_change_of_workers_neither_repeat_nor_skip_a_sample(jobs: JobFile) -> None:
    run = jobs.submit("sampled")
    wait_until(lambda: len(metrics(run)) >= 15, "step 15")
    (rank,) = events(run, "started")[0]["ranks"]
    os.kill(rank["pid"], signal.SIGKILL)
    wait_until(lambda: len(events(run, "started")) == 2 and metrics(run)[-1]["step"] >= 25, "step 25 again")
    stopped = json.loads(jobs.shoal("stop", run.name, "--json").stdout)
    assert stopped["status"] == "stopped"
    resumed = jobs.shoal("resume", run.name, "--json", "--set", "workers.min=2", "--set", "workers.max=2")
    result = json.loads(resumed.stdout)
    assert (result["status"], result["world_sizes"]) == ("succeeded", [1, 1, 2]), result

    taken = samples_by_step(run, jobs.path.parent / "seen")
    assert sorted(taken) == list(range(1, STEPS + 1))
    stream = [sample for step in sorted(taken) for sample in taken[step]]
    epochs, rest = divmod(len(stream), SAMPLES)
    assert epochs == 9
    for epoch in range(epochs):  # no epoch ends at a step's end: 52 is no multiple of 8
        assert Counter(stream[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == Counter(range(SAMPLES))
    assert max(Counter(stream[epochs * SAMPLES :]).values()) == 1
    assert rest > 0
    assert (run / "export").exists() is False, "what nobody publishes is not kept"


@pytest.mark.slow
def test_a_script_is_started_again_with_what_it_saved_and_its_logs_are_kept_by_rank(jobs: JobFile) -> None:
    run = jobs.submit("script")
    following = jobs.start("logs", run.name, "--follow")
    log = run / "logs" / "attempt-1" / "rank-1.log"
    wait_until(lambda: log.exists() and "step 10," in log.read_text(), "step 10 of the script")
    ranks = events(run, "started")[0]["ranks"]
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    end = wait_until(lambda: next(iter(events(run, "finished")), None), "the end")
    assert end["status"] == "succeeded", end
    (failure,) = events(run, "failed")
    assert (failure["failure_class"], failure["rank"]) == ("worker", 1)
    for rank in (0, 1):
        first, again = (
            (run / "logs" / f"attempt-{attempt}" / f"rank-{rank}.log").read_text() for attempt in (1, 2)
        )
        assert first.startswith(f"rank {rank} of 2: from step 0 on")
        began = int(again.split("from step ")[1].split()[0])
        assert began >= 9
        assert f"rank {rank}: step 40, loss" in again
    followed, said = following.communicate(timeout=TIMEOUT_S)
    story = jobs.shoal("logs", run.name).stdout
    assert sorted(followed.splitlines()) == sorted(story.splitlines())
    told = re.findall(
        r"^(leased|failed attempt=1|recovered attempt=2|trained|finished|rank \d.* on$)", story, re.M
    )
    from_0, on = "rank 0 of 2: from step 0 on", f"rank 0 of 2: from step {began} on"
    first_attempt, second = ["leased", from_0, "failed attempt=1"], ["leased", "recovered attempt=2", on]
    assert told == [*first_attempt, *second, "trained", "finished"], story
    assert "rank 1" not in re.findall(r"^rank \d", story, re.M)
    assert f"what its ranks printed: {run}/logs" in said


@pytest.mark.slow
def test_ranks_have_what_is_passed_on_by_an_entrypoint_and_later_by_whoever_resumes(jobs: JobFile) -> None:
    ray = str(Path(sys.executable).with_name("ray"))
    entrypoint = ("env", "SECRET=first", "python", "-m", "train_jobs", "shows")
    done = subprocess.run(
        [ray, "job", "submit", "--working-dir", str(jobs.path.parent), "--", *entrypoint],
        env=jobs.live.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    (run,) = (Path(jobs.live.record.storage) / "jobs").glob("shows-*")
    (failure,) = events(run, "failed")
    assert failure["failure_class"] == "code", done.stdout
    log = run / "logs" / "attempt-1" / "rank-0.log"
    assert log.read_text() == "plain first\n"

    refused = jobs.shoal("resume", run.name)
    assert refused.returncode == 2
    assert "env: SECRET should be passed on (null in the config), and is not set here" in refused.stderr
    resumed = shoal("resume", run.name, "--json", "-f", str(jobs.path), SECRET="second")
    assert json.loads(resumed.stdout)["status"] == "succeeded", resumed.stderr
    assert (run / "logs" / "attempt-2" / "rank-0.log").read_text() == "plain second\n"
    assert not {"first", "second"} & set((run / "config.yaml").read_text().split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_scaling_table_of_a_job_is_measured_and_drawn(jobs: JobFile, tmp_path: Path) -> None:
    picture = tmp_path / "scaling.png"
    options = ("--workers", "1,2", "--strategies", "ddp,fsdp", "--steps", "10", "--repeats", "1")
    settings = ("--set", "settings.pause_s=0.0", "--plot", str(picture))
    done = jobs.shoal("bench", "train", "sampled", "--json", *options, *settings)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["unit"], found["steps"], found["peak_flops_from"]) == ("samples", 10, "measured")
    cases = [(row["strategy"], row["workers"]) for row in found["rows"]]
    assert cases == [("ddp", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2)]
    for row in found["rows"]:
        assert row["rate"] > 0
        assert row["peak_memory_bytes"] > 50e6
        assert (row["workers"] == 1) is (row["communication"] < 0.01)
    assert picture.read_bytes().startswith(b"\x89PNG")
