"""What SIGKILLs of workers cost under Shoal, under Ray Train's TorchftConfig and under Ray Train alone.

    python tests/benchmarks/fault_tolerance.py [--json] [--workers 2 3] [--kills 10] [--only SYSTEM...]
        [--torchft DIRECTORY]

All three train the same Llama on the same tokens with the same global batch, one thread a worker, on one
cluster, one after another; run by hand on an idle machine. Shoal has replica groups of one worker, as has
TorchftConfig; Ray Train alone saves a checkpoint every 20 steps and starts again from it. The programs of the
last two are in fault_tolerance_programs, in the style of Ray's own examples.

First STEADY steps are done undisturbed: their median is the throughput. Then one worker after another gets
SIGKILL, each once STEADY more steps were done by all. A pause is the longest time between two steps of the
job (by whichever worker) in the steps after a kill, while another worker lives: what those that stay have to
wait. A step is lost or repeated where it was done by nobody, or again; a sample is lost where it was drawn
and no step that counts had it, and repeated where two of them had it.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.training_throughput import architecture
from tests.clusters import LiveCluster, started
from tests.integration.jobs import JobFile, events, finished, job_file, metrics, wait_until

NODES = (
    # TorchftConfig wants a CPU where its controller is.
    "nodes: [{name: head, cpus: 2}, {name: worker, count: 2, cpus: 2}]",
    "storage: ./storage",
    "sharing: {avoid_after: 0}",  # a node whose ranks are killed again and again would get none any more
)
PROGRAMS = Path(__file__).parent / "fault_tolerance_programs"
MODEL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 1024}
LENGTH, GLOBAL = 64, 24
STEADY = 40
TIMEOUT_S = 120.0
SYSTEMS = ("shoal", "torchft", "ray_train")


@dataclass(frozen=True)
class Step:
    """A step as one worker did it, or as the job tells it."""

    time: float
    step: int
    samples: tuple[int, ...] = ()
    counts: bool = True


@dataclass(frozen=True)
class Outcome:
    """What was seen of one system with so many workers.

    Attributes:
        pauses_s: one for each kill.
        back_s: from each kill until all workers stepped again.
        samples_lost, samples_repeated: None where they follow from the steps.
    """

    system: str
    workers: int
    samples_per_s: float
    usual_step_s: float
    pauses_s: list[float]
    back_s: list[float]
    steps: int
    steps_lost: int
    steps_repeated: int
    samples_lost: int | None
    samples_repeated: int | None


def seconds_of(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


class ShoalRun:
    """A job of replica groups of one worker."""

    def __init__(self, jobs: JobFile, workers: int) -> None:
        settings = (
            f"workers.min={workers}",
            f"workers.max={workers}",
            f"batch.micro={GLOBAL // workers}",
        )
        self.workers = workers
        self._jobs = jobs
        self.run = jobs.submit("job", *(word for each in settings for word in ("--set", each)))

    def steps(self) -> list[Step]:
        lines = metrics(self.run)
        return [Step(seconds_of(line), line["step"]) for line in lines]

    def alive(self) -> list[int]:
        pids = [rank["pid"] for event in events(self.run, "started") for rank in event["ranks"]]
        return [pid for pid in pids if psutil.pid_exists(pid)]

    def all_step(self, since: float) -> bool:
        lines = [
            line for line in metrics(self.run) if datetime.fromisoformat(line["time"]).timestamp() > since
        ]
        full = [line for line in lines if line["world_size"] == self.workers]
        return len(self.alive()) == self.workers and bool(full)

    def said(self) -> str:
        return str(events(self.run))[-4000:]

    def stop(self) -> None:
        assert self._jobs.shoal("stop", self.run.name).returncode == 0
        finished(self.run)


class RayRun:
    """A program for Ray Train, whose workers write what they do."""

    def __init__(
        self, live: LiveCluster, program: str, workers: int, tokens: Path, directory: Path, path: str
    ) -> None:
        self.workers = workers
        self._out = directory / "out"
        self._out.mkdir()
        settings = {
            "workers": workers,
            "batch": GLOBAL // workers,
            "length": LENGTH,
            "tokens": str(tokens),
            "model": architecture(MODEL),
            "out": str(self._out),
            "storage": str(directory / "ray"),
            "python_path": path,
        }
        file = directory / "settings.json"
        file.write_text(json.dumps(settings))
        self._log = directory / "log"
        with self._log.open("w") as log:
            self._program = subprocess.Popen(
                [sys.executable, str(PROGRAMS / program), str(file)],
                env=live.environment,
                cwd=directory,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def by_worker(self) -> dict[int, list[Step]]:
        found = {}
        for path in self._out.glob("*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            found[int(path.stem)] = [
                Step(line["time"], line["step"], tuple(line["samples"]), line.get("counts", True))
                for line in lines
            ]
        return found

    def steps(self) -> list[Step]:
        return sorted(
            (step for steps in self.by_worker().values() for step in steps), key=lambda each: each.time
        )

    def alive(self) -> list[int]:
        return [pid for pid in self.by_worker() if psutil.pid_exists(pid)]

    def all_step(self, since: float) -> bool:
        stepping = [
            pid
            for pid, steps in self.by_worker().items()
            if psutil.pid_exists(pid) and any(step.time > since and step.counts for step in steps)
        ]
        return len(stepping) == self.workers

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        self._program.send_signal(signal.SIGTERM)
        try:
            self._program.wait(60)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()


def longest_pause(steps: list[Step], killed_at: float, until: float) -> float:
    """The longest time between two steps of the job from just before a kill on."""
    new: list[float] = []
    furthest = -1
    for each in steps:
        if each.counts and each.step > furthest:
            furthest = each.step
            new.append(each.time)
    before = max((moment for moment in new if moment <= killed_at), default=killed_at)
    after = [moment for moment in new if killed_at < moment <= until]
    moments = [before, *after]
    return max((b - a for a, b in itertools.pairwise(moments)), default=until - killed_at)


def watch(system: str, run: ShoalRun | RayRun, kills: int) -> Outcome:
    """Let it run, and kill one worker after another."""

    def far_enough() -> Callable[[], bool]:
        first = max((step.step for step in run.steps()), default=0)
        return lambda: max((step.step for step in run.steps()), default=0) >= first + STEADY

    began = time.time()
    wait_until(lambda: run.all_step(began), f"{system}: all {run.workers} workers", TIMEOUT_S)
    since = time.time()
    wait_until(far_enough(), f"{system}: steps", TIMEOUT_S)
    steady = [step.time for step in run.steps() if step.time > since]
    firsts = sorted({step.step: step.time for step in reversed(run.steps()) if step.time > since}.values())
    usual = statistics.median(b - a for a, b in itertools.pairwise(firsts))
    assert steady
    pauses, back = [], []
    for number in range(kills):
        victim = sorted(run.alive())[number % run.workers]
        killed_at = time.time()
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda at=killed_at: run.all_step(at), f"{system}: all after a kill", TIMEOUT_S)
        back.append(time.time() - killed_at)
        wait_until(far_enough(), f"{system}: steps after a kill", TIMEOUT_S)
        pauses.append(longest_pause(run.steps(), killed_at, time.time()))
        print(
            f"{system} {run.workers}: {pauses[-1]:.2f} s, all back {back[-1]:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    run.stop()
    return account(system, run, GLOBAL / usual, usual, pauses, back)


def account(
    system: str, run: ShoalRun | RayRun, rate: float, usual_s: float, pauses: list[float], back: list[float]
) -> Outcome:
    steps = run.steps()
    if isinstance(run, ShoalRun):
        numbers = [step.step for step in steps]
        again, lost = len(numbers) - len(set(numbers)), max(numbers) - len(set(numbers))
        return Outcome(
            system, run.workers, rate, usual_s, pauses, back, len(set(numbers)), lost, again, None, None
        )
    counting = {step.step for step in steps if step.counts}
    workers = run.by_worker().values()
    drawn = Counter(sample for own in workers for step in own for sample in step.samples)
    had = Counter(sample for own in workers for step in own if step.counts for sample in step.samples)
    firsts = sum(max(0, earlier.step - later.step + 1) for earlier, later in went_back(steps))
    return Outcome(
        system,
        run.workers,
        rate,
        usual_s,
        pauses,
        back,
        len(counting),
        max(counting) - len(counting),
        firsts,
        sum(1 for sample in drawn if not had[sample]),
        sum(count - 1 for count in had.values()),
    )


def went_back(steps: list[Step]) -> Iterator[tuple[Step, Step]]:
    """Where the job went on from a step that it had done before: the furthest until then, and that one."""
    furthest: Step | None = None
    behind = False
    for each in steps:
        if not each.counts:
            continue
        if furthest is not None and each.step < furthest.step - 1 and not behind:
            behind = True
            yield furthest, each
        if furthest is None or each.step > furthest.step:
            furthest, behind = each, False


def lines_changed(program: str) -> int:
    """Lines of the loop of one process that are other ones, or more, in a program."""
    plain, other = ((PROGRAMS / name).read_text().splitlines() for name in ("loop.py", program))
    return sum(line.startswith("+ ") for line in difflib.ndiff(plain, other))


@contextmanager
def cluster(directory: Path) -> Iterator[tuple[LiveCluster, JobFile]]:
    job = {
        "model": MODEL,
        "data": {"source": "python-stdlib", "sequence_length": LENGTH},
        "parallel": {"strategy": "ddp"},
        "workers": {"min": 2, "max": 2, "group": 1, "cpus": 1},
        "batch": {"global": GLOBAL, "micro": 4},
        "optimizer": {"learning_rate": 1.0e-3, "schedule": "constant"},
        "steps": 1_000_000,
        "evaluate": {"every_steps": None},
        "checkpoint": {"every_steps": 1000},
    }
    (directory / "jobs").mkdir()
    with started(directory / "cluster", *NODES) as live:
        yield live, job_file(live, directory / "jobs", {"job": job})


def measure(options: argparse.Namespace) -> list[Outcome]:
    found = []
    with tempfile.TemporaryDirectory() as kept, cluster(Path(kept)) as (live, jobs):
        first = ShoalRun(jobs, 2)  # for the tokens, which all have
        tokens = first.run / "data" / "train.npy"
        wait_until(first.steps, "the first step", TIMEOUT_S)
        first.stop()
        for workers in options.workers:
            for system in options.only:
                directory = Path(kept) / f"{system}-{workers}"
                directory.mkdir()
                if system == "shoal":
                    run: ShoalRun | RayRun = ShoalRun(jobs, workers)
                else:
                    run = RayRun(live, f"{system}_loop.py", workers, tokens, directory, options.torchft)
                try:
                    found.append(watch(system, run, options.kills))
                except AssertionError as error:
                    run.stop()
                    raise SystemExit(f"{error}\n{run.said()}") from error
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--torchft", default="", help="where `pip install --target` put another torchft for TorchftConfig"
    )
    options = parser.parse_args()
    rows = measure(options)
    changed = {"shoal": 0} | {name: lines_changed(f"{name}_loop.py") for name in SYSTEMS[1:]}
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "lines_changed": changed}))
        return
    print("system     workers  samples/s  pause median / worst  all back  steps lost, repeated  samples")
    for row in rows:
        pause = f"{statistics.median(row.pauses_s):.2f} / {max(row.pauses_s):.2f} s"
        samples = "" if row.samples_lost is None else f"{row.samples_lost}, {row.samples_repeated}"
        print(
            f"{row.system:10} {row.workers:7} {row.samples_per_s:10.0f} {pause:>21}"
            f" {statistics.median(row.back_s):7.1f} s {row.steps_lost:10}, {row.steps_repeated:8}  {samples}"
        )
    print(f"lines of the loop that a user changes: {changed}")


if __name__ == "__main__":
    main()
