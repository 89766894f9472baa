"""What joins, leaves and kills of replica groups cost those that stay, beside Ray Train alone; run by hand.

    python tests/benchmarks/elastic_changes.py [--json] [--rounds 5] [--repeats 3] [--only PART...]

Parts, on one cluster that is otherwise idle:

- pauses: an elastic job of up to three groups of one rank; in every round somebody else takes a device (a
  group leaves) and gives it back (one joins), and one rank gets SIGKILL (and its group joins again). A pause
  is the longest step around the change; the bars are the median step + 0.5 s for joins and leaves, and the
  heartbeat timeout more for a SIGKILL. Beside them, in the same run: two workers of Ray Train alone that
  report and save nothing but what they must, one killed; from the kill to the next step.
- throughput: the same two workers as two replica groups and as one group, in turns (A B A B …), on all cores.
- spare: the same on a cluster of its own, with the two ranks on one core and all that Ray and Shoal run
  beside them on the others: what a node sees whose cores are not all taken by its ranks, as one with GPUs.
- tie: the same, as plain processes without Ray: what the tie costs, without the processes that Ray has for
  every group.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from cluster.config.sections.train import RecoveryConfig, TrainJobConfig
from infra.lab.faults import ray_train
from tests.benchmarks.training_throughput import BATCH, JOB, LENGTH
from tests.clusters import LiveCluster, started
from tests.integration.jobs import JobFile, events, finished, job_file, metrics, wait_until
from tests.train_jobs.elastic.groups import Groups
from tests.train_jobs.ranks import run_ranks

NODES = (
    "nodes: [{name: head, cpus: 0}, {name: worker, count: 2, cpus: 2}]",
    "storage: ./storage",
    "sharing: {avoid_after: 0}",  # a node whose ranks are killed again and again would get none any more
)
SMALL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 1024}
HEARTBEAT_TIMEOUT_S = RecoveryConfig().heartbeat_timeout_s
RUN_TIMEOUT_S = 600
AROUND = 5
"""Steps after a change in which a slow one is put down to it."""

TAKE_A_DEVICE = """
import logging, sys
import ray
ray.init(namespace="shoal", log_to_driver=False, logging_level=logging.ERROR)
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand
broker = BrokerClient()
demand = Demand("bench/one", "serving", {"CPU": 1}, 2, 2)
grant = broker.wait(demand, timeout_s=60)
import threading
ended = threading.Event()
def keep():
    while not ended.wait(1):
        broker.request(Demand("bench/one", "serving", {"CPU": 1}, 2, 2, grant.nodes))
threading.Thread(target=keep, daemon=True).start()
print("taken", flush=True)
sys.stdin.read()
ended.set()
broker.release("bench/one")
"""


def job_of(workers: dict[str, int], **changes: Any) -> dict[str, Any]:
    return {**JOB, "parallel": {"strategy": "ddp"}, **changes, "workers": {"cpus": 1, **workers}}


def wait_for_change(run: Path, what: str, before: int) -> dict[str, Any]:
    """The next change of the groups, of this kind, once a few steps have been done after it."""
    changes = wait_until(
        lambda: [each for each in events(run, "resized")[before:] if each[what]], f"a group that {what}"
    )
    wait_until(lambda: metrics(run)[-1]["step"] > changes[0]["step"] + AROUND, "steps after it")
    return changes[0]


def pause(run: Path, change: dict[str, Any]) -> float:
    """The longest step around a change."""
    first = change["step"]
    near = [line for line in metrics(run) if first <= line["step"] <= first + AROUND]
    return max(line["step_s"] for line in near if not line.get("profiled"))


def measure_pauses(jobs: JobFile, live: LiveCluster, rounds: int) -> dict[str, Any]:
    run = jobs.submit("small")
    wait_until(lambda: metrics(run) and metrics(run)[-1]["world_size"] == 3, "three groups")
    pauses: dict[str, list[float]] = {"joined": [], "left": [], "lost": []}

    def change(what: str, cause: Callable[[], object]) -> None:
        before = len(events(run, "resized"))
        cause()
        pauses[what].append(pause(run, wait_for_change(run, what, before)))

    for _ in range(rounds):
        before = len(events(run, "resized"))
        with live.running(TAKE_A_DEVICE, "taken"):
            pauses["left"].append(pause(run, wait_for_change(run, "left", before)))
        change("joined", lambda: None)
        victim = events(run, "started")[-1]["ranks"][0]["pid"]
        change("lost", psutil.Process(victim).kill)
        change("joined", lambda: None)
    assert jobs.shoal("stop", run.name).returncode == 0
    finished(run)
    lines = metrics(run)
    steps = [line["step"] for line in lines]
    usual = statistics.median(line["step_s"] for line in lines if not line.get("profiled"))
    return {
        "median_step_s": usual,
        "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        "pauses_s": pauses,
        "steps": len(set(steps)),
        "steps_lost": max(steps) - len(set(steps)),
        "steps_repeated": len(steps) - len(set(steps)),
        "attempts": len({line["attempt"] for line in lines}),
    }


def measure_throughput(jobs: JobFile, repeats: int, core: int | None = None) -> dict[str, Any]:
    """Tokens a second of two groups and of one group, and the ratios of neighbouring runs.

    `core` is what their ranks share, where they do not have them all.
    """
    rates: dict[str, list[float]] = {"two_groups": [], "one_group": []}
    for _ in range(repeats):
        for name, found in rates.items():
            run = jobs.submit(name)
            if core is not None:
                move_ranks(run, core)
            assert finished(run, RUN_TIMEOUT_S)["status"] == "succeeded"
            seconds = [line["step_s"] for line in metrics(run) if not line.get("profiled")]
            found.append(tokens_per_s(seconds))
            print(f"{name}: {found[-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    return with_ratio(rates)


def move_ranks(run: Path, core: int) -> None:
    """Keep both ranks of a job to one core, with all their threads and those that they start."""

    def pids() -> list[int]:
        return [rank["pid"] for event in events(run, "started") for rank in event["ranks"]]

    wait_until(lambda: len(pids()) == 2, "both ranks")
    for pid in pids():
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, {core})


def measure_tie(repeats: int, steps: int) -> dict[str, Any]:
    """As measure_throughput does, without a cluster."""
    rates: dict[str, list[float]] = {"two_groups": [], "one_group": []}
    changes = {"steps": steps, "checkpoint": {"every_steps": steps}}
    for _ in range(repeats):
        for name, found in rates.items():
            workers = {"min": 2, "max": 2} | ({"group": 1} if name == "two_groups" else {})
            config = TrainJobConfig.model_validate(job_of(workers, **changes))
            with tempfile.TemporaryDirectory() as directory:
                if name == "two_groups":
                    groups = Groups(config, Path(directory), ["a", "b"])
                    groups.start("a", "b")
                    groups.wait("a", "b")
                    lines = groups.lines()
                else:
                    lines = run_ranks(config, Path(directory), 2)
            found.append(tokens_per_s([line["step_s"] for line in lines if not line.get("profiled")]))
            print(f"{name}, without Ray: {found[-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    return with_ratio(rates)


def tokens_per_s(seconds: list[float]) -> float:
    """Of a run's steps but the first quarter."""
    return BATCH["global"] * LENGTH / statistics.median(seconds[len(seconds) // 4 :])


def with_ratio(rates: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(rates["two_groups"], rates["one_group"], strict=True)]
    return {**rates, "ratios": ratios, "ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parts = ["pauses", "throughput", "spare", "tie"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    result = measure(options)
    if options.json:
        print(json.dumps(result))
        return
    if "pauses" in result:
        found = result["pauses"]
        print(f"median step {found['median_step_s']:.3f} s, heartbeat timeout {HEARTBEAT_TIMEOUT_S} s")
        for what, seconds in found["pauses_s"].items():
            worst, count = max(seconds), len(seconds)
            print(f"{what:7} median {statistics.median(seconds):.2f} s, worst {worst:.2f} s of {count}")
        print(f"{found['steps']} steps, lost {found['steps_lost']}, repeated {found['steps_repeated']}")
        alone = ", ".join(f"{each:.1f} s" for each in result["ray_train_s"])
        print(f"Ray Train alone, SIGKILL to next step: {alone}")
    whats = {"throughput": "", "spare": ", ranks on one core", "tie": ", without Ray"}
    for part, what in whats.items():
        if part in result:
            shown = ", ".join(f"{each:.3f}" for each in result[part]["ratios"])
            print(f"two groups / one group{what}: {result[part]['ratio']:.3f} ({shown})")


@contextmanager
def cluster(steps: int) -> Iterator[tuple[LiveCluster, JobFile]]:
    all_of_them = {"steps": steps, "checkpoint": {"every_steps": steps}}
    small = job_of(
        {"min": 1, "max": 3},
        model=SMALL,
        data={"source": "python-stdlib", "sequence_length": 64},
        batch={"global": 24, "micro": 4},
        steps=1_000_000,
        checkpoint={"every_steps": 1000},
    )
    jobs = {
        "small": small,
        "two_groups": job_of({"min": 2, "max": 2, "group": 1}, **all_of_them),
        "one_group": job_of({"min": 2, "max": 2}, **all_of_them),
    }
    with tempfile.TemporaryDirectory() as kept, started(Path(kept) / "cluster", *NODES) as live:
        (Path(kept) / "jobs").mkdir()
        yield live, job_file(live, Path(kept) / "jobs", jobs)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if "tie" in options.only:
        result["tie"] = measure_tie(options.repeats, options.steps)
    if "spare" in options.only:
        cores = os.sched_getaffinity(0)
        first, *others = sorted(cores)
        os.sched_setaffinity(0, others)  # what is started from here on inherits it
        try:
            with cluster(options.steps) as (_, jobs):
                result["spare"] = measure_throughput(jobs, options.repeats, core=first)
        finally:
            os.sched_setaffinity(0, cores)
    if {"pauses", "throughput"} & set(options.only):
        with cluster(options.steps) as (live, jobs):
            if "pauses" in options.only:
                result["pauses"] = measure_pauses(jobs, live, options.rounds)
                result["ray_train_s"] = ray_train.measure(live.environment, min(3, options.rounds))
            if "throughput" in options.only:
                result["throughput"] = measure_throughput(jobs, options.repeats)
    return result


if __name__ == "__main__":
    main()
