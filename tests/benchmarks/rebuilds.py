"""How long a job of one group stands still when its grant changes or a rank is killed; run by hand.

    python tests/benchmarks/rebuilds.py [--json] [--rounds 5] [--only rebuilds kills]

One cluster, otherwise idle. Rebuilds: somebody else takes a device of an FSDP job of up to three ranks, and
gives it back. Kills: one of two ranks gets SIGKILL; in the same run, the same for two workers of Ray Train
alone that report and save nothing. A pause lies between the last step before and the first step after, and
its parts between the events of the job.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from infra.lab.faults import ray_train
from tests.benchmarks.elastic_changes import NODES, SMALL, TAKE_A_DEVICE, job_of
from tests.clusters import LiveCluster, started
from tests.integration.jobs import JobFile, events, finished, job_file, metrics, wait_until

Pause = dict[str, float]
"""Seconds by part, in order, with those of the whole as "pause"."""


def seconds(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def pause(run: Path, attempt: int) -> Pause:
    """What it took from the last step before this attempt to its first one."""
    lines = metrics(run)
    first = next(index for index, line in enumerate(lines) if line["attempt"] == attempt)
    began, ended = seconds(lines[first - 1]), seconds(lines[first])
    parts: Pause = {}
    at = began
    for event in events(run):
        if began < (when := seconds(event)) <= ended:
            parts[event["kind"]] = parts.get(event["kind"], 0.0) + when - at
            at = when
    return {**parts, "first step": ended - at, "pause": ended - began}


def next_pause(run: Path) -> Pause:
    """Wait for the next attempt and a few of its steps."""
    attempt = metrics(run)[-1]["attempt"] + 1
    wait_until(lambda: (last := metrics(run)[-1])["attempt"] == attempt and last["step"] % 50 > 20, "steps")
    return pause(run, attempt)


def measure_rebuilds(jobs: JobFile, live: LiveCluster, rounds: int) -> dict[str, list[Pause]]:
    run = jobs.submit("elastic")
    wait_until(lambda: len(metrics(run)) > 20, "steps")
    found: dict[str, list[Pause]] = {"shrinks": [], "grows": []}
    for _ in range(rounds):
        with live.running(TAKE_A_DEVICE, "taken"):
            found["shrinks"].append(next_pause(run))
        found["grows"].append(next_pause(run))
    finish(jobs, run)
    return found


def measure_kills(jobs: JobFile, rounds: int) -> list[Pause]:
    run = jobs.submit("fixed")
    wait_until(lambda: len(metrics(run)) > 20, "steps")
    found = []
    for _ in range(rounds):
        furthest = max(line["step"] for line in metrics(run))
        # A job that fails again before it has got further waits longer every time.
        wait_until(lambda furthest=furthest: metrics(run)[-1]["step"] > furthest, "a step further")  # type: ignore[misc]
        psutil.Process(events(run, "started")[-1]["ranks"][1]["pid"]).kill()
        found.append(next_pause(run))
    finish(jobs, run, repeats=True)
    return found


def finish(jobs: JobFile, run: Path, *, repeats: bool = False) -> None:
    """Stop the job; each step must stand once, unless it went back to a checkpoint."""
    assert jobs.shoal("stop", run.name).returncode == 0
    finished(run)
    steps = [line["step"] for line in metrics(run)]
    assert sorted(set(steps) if repeats else steps) == list(range(1, max(steps) + 1)), "a step is missing"


def show(what: str, pauses: list[Pause]) -> None:
    whole = [each["pause"] for each in pauses]
    print(f"{what}: median {statistics.median(whole):.2f} s, worst {max(whole):.2f} s of {len(whole)}")
    for part in dict.fromkeys(name for each in pauses for name in each if name != "pause"):
        print(f"  {part:12} {statistics.median(each.get(part, 0.0) for each in pauses):6.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=["rebuilds", "kills"], default=["rebuilds", "kills"])
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, started(Path(directory) / "cluster", *NODES) as live:
        (Path(directory) / "jobs").mkdir()
        job = {
            "model": SMALL,
            "data": {"source": "python-stdlib", "sequence_length": 64},
            "parallel": {"strategy": "fsdp"},
            "batch": {"global": 24, "micro": 4},
            "steps": 1_000_000,
            "checkpoint": {"every_steps": 50},
        }
        jobs = job_file(
            live,
            Path(directory) / "jobs",
            {
                "elastic": job_of({"min": 1, "max": 3}, **job),
                "fixed": job_of({"min": 2, "max": 2}, **job),
            },
        )
        if "rebuilds" in options.only:
            result["rebuilds"] = measure_rebuilds(jobs, live, options.rounds)
        if "kills" in options.only:
            result["kills"] = measure_kills(jobs, options.rounds)
            result["ray_train_s"] = ray_train.measure(live.environment, options.rounds)
    if options.json:
        print(json.dumps(result))
        return
    for what, pauses in result.get("rebuilds", {}).items():
        show(what, pauses)
    if "kills" in result:
        show("SIGKILL of a rank", result["kills"])
        alone = result["ray_train_s"]
        print(f"Ray Train alone: median {statistics.median(alone):.2f} s, worst {max(alone):.2f} s")


if __name__ == "__main__":
    main()
