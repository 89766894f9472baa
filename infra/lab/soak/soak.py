"""The run of a soak: a cluster of its own, jobs and an app on it, faults and load, and the oracle's word."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.errors import ShoalError
from cluster.sharing.audit import granted_twice
from cluster.sharing.journal import journal_storage, read_events
from infra.lab.bench.clients import SteadyLoad
from infra.lab.bench.own_cluster import OwnCluster, OwnJob
from infra.lab.faults.nodes import kill_node, start_node
from infra.lab.faults.processes import OF_JOBS, REPLICA, TITLES
from infra.lab.soak import oracle
from infra.lab.soak.plan import CLIENTS, FAULTS, Fault, Level, faults, levels

APP = "chat"
ELASTIC, FIXED, SERVED = "elastic", "fixed", "served"
STEPS = {ELASTIC: 1200, FIXED: 300}
TOLERANCE = {ELASTIC: 1e-4, FIXED: 0.0}
"""Relative, of losses. A group more or less changes the order in which gradients are summed; one group that
goes back to a checkpoint changes nothing."""
SAVE_EVERY = 50
FROZEN_S = 6.0
NODES = ("worker-1", "worker-2")
AWAY_S = 10.0
"""A node is started again so long after all of its processes were killed."""
REQUEST_TIMEOUT_S = 60.0
"""After which the app says that a request took too long."""
PATIENCE_S = 2 * REQUEST_TIMEOUT_S
"""Of clients: who has heard nothing by then was forgotten."""
MOST_REASONS = 20
SETTLE_S = 120.0
"""How long the last jobs, leases and processes may take to end."""
_LOOK_S = 0.2
_MODEL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 1024}


def config() -> dict[str, Any]:
    """A cluster on which an elastic job, a fixed one and an app want more than there is."""
    job = {
        "model": _MODEL,
        "data": {"source": "python-stdlib", "sequence_length": 64, "held_out_every": 50},
        "batch": {"global": 24, "micro": 4},
        "evaluate": {"every_steps": None},
        "checkpoint": {"every_steps": SAVE_EVERY},
        "recovery": {
            # Whoever shoots on purpose must not use up what is meant for accidents.
            **{f"{what}_failures": 1000 for what in ("worker", "node", "start", "memory")},
            "transient_errors": 1000,
            "hangs": 1000,
            "hang_timeout_s": 20.0,
        },
        "seed": 7,
    }
    return {
        "cluster": {
            "nodes": [
                {"name": "head", "cpus": 0},
                *({"name": node, "cpus": 3} for node in NODES),
            ],
            "sharing": {"reclaim_grace_s": 10, "settle_s": 1, "avoid_after": 0},
        },
        "train_jobs": {
            ELASTIC: {**job, "workers": {"min": 1, "max": 4}, "steps": STEPS[ELASTIC]},
            FIXED: {
                **job,
                "parallel": {"strategy": "fsdp"},
                "workers": {"min": 2, "max": 2},
                "steps": STEPS[FIXED],
            },
            SERVED: {
                **job,
                "workers": {"min": 2, "max": 2},
                "parallel": {"strategy": "fsdp"},
                "steps": 20,
                "publish": SERVED,
            },
        },
        "serve_apps": {
            APP: {
                "model": f"{SERVED}@latest",
                "replicas": {"min": 1, "max": 2},
                "autoscale": {"target_ongoing_requests": 4, "downscale_delay_s": 5},
                "limits": {"max_tokens": 64, "queue": 64, "request_timeout_s": REQUEST_TIMEOUT_S},
            }
        },
    }


@dataclass
class SoakReport:
    """What a soak did, and what was wrong.

    Attributes:
        faults: done, by kind; `missed` are those for which there was nobody to hit.
        requests: answered, and the others by oracle.outcome; `reasons` are what those were told.
        wrong: a sentence each; none of them is the bar.
    """

    seed: int
    minutes: float
    faults: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    jobs: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    steps_done_again: int = 0
    attempts: int = 0
    resized: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    rises: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.wrong

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


class Soak:
    """Runs jobs one after another beside an app, while faults and load come as planned.

    Args:
        say: takes each sentence about what happens.
    """

    def __init__(
        self, minutes: float, seed: int, say: Callable[[str], None], kinds: Sequence[str] = tuple(FAULTS)
    ) -> None:
        self.seconds = minutes * 60.0
        self.seed = seed
        self.say = say
        self.kinds = kinds
        self.report = SoakReport(seed, minutes)
        self._done: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._running: dict[str, OwnJob] = {}
        self._ended: list[tuple[str, OwnJob]] = []
        self._nodes = list(NODES)
        """Those that are there."""
        self._mends: list[threading.Timer] = []
        """What undoes a fault, later."""
        self._over = threading.Event()

    def run(self) -> SoakReport:
        """All of it, the cluster's start and end included."""
        with OwnCluster(config(), self.say) as cluster, self._mending():
            self.cluster = cluster
            self.say("what the jobs compute when nobody disturbs them")
            reference = {name: self._undisturbed(name) for name in (ELASTIC, FIXED)}
            base_url = self._serve()
            jobs = [
                threading.Thread(target=self._keep_running, args=(name, pause), name=name, daemon=True)
                for name, pause in ((ELASTIC, 2.0), (FIXED, 20.0))
            ]
            with SteadyLoad(base_url, APP, "import os\n\n\ndef ", CLIENTS[1], timeout_s=PATIENCE_S) as load:
                for job in jobs:
                    job.start()
                self._play(load)
                self._over.set()
                self.say("no more faults; what runs may end")
                for job in jobs:
                    job.join()
            self._judge(reference, load)
        return self.report

    @contextmanager
    def _mending(self) -> Iterator[None]:
        """Whoever ends this early must not have a node started beside the end of the cluster."""
        try:
            yield
        finally:
            for timer in self._mends:
                timer.cancel()
                timer.join()

    # -- the parts of the run ---------------------------------------------------------------------------

    def _undisturbed(self, name: str) -> dict[int, float]:
        """Losses by step, of a run that has the cluster for itself and workers of a fixed number."""
        changes: Mapping[str, Any] = {}
        if name == ELASTIC:
            own = self.cluster.loaded.resolved.train_jobs[name].workers.model_dump()
            changes = {"workers": {**own, "min": 2, "max": 2, "group": 1}}
        job = self.cluster.submit(name, changes)
        self._finish(job, 900.0)
        return {line["step"]: line["loss"] for line in job.metrics()}

    def _serve(self) -> str:
        self._finish(self.cluster.submit(SERVED), 300.0)
        return self.cluster.serve([APP])

    def _finish(self, job: OwnJob, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not job.events("finished"):
            if time.monotonic() > deadline:
                raise ShoalError(f"{job.job} has not ended within {timeout_s:.0f} s")
            time.sleep(_LOOK_S)
        end = job.events("finished")[-1]
        if end["status"] != "succeeded":
            raise ShoalError(f"{job.job} has {end['status']}: {end['error']}")

    def _keep_running(self, name: str, pause_s: float) -> None:
        """Submit a job again and again; one whose driver was killed is resumed."""
        while not self._over.wait(pause_s):
            try:
                job = self.cluster.submit(name)
                self._running[name] = job
                self._until_ended(job)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is a finding)
                self.report.wrong.append(f"{name}: {type(error).__name__}: {error}")
            finally:
                if (begun := self._running.pop(name, None)) is not None:
                    self._ended.append((name, begun))

    def _until_ended(self, job: OwnJob) -> None:
        deadline: float | None = None
        while not job.events("finished"):
            if job.status() == "failed" and not job.events("finished"):
                self.say(f"resuming {job.job}")
                job.resume()
            if self._over.is_set():
                deadline = deadline or time.monotonic() + 600.0
                if time.monotonic() > deadline:
                    raise ShoalError(f"{job.job} has not ended 600 s after the last fault")
            time.sleep(1.0)

    def _play(self, load: SteadyLoad) -> None:
        """Do what is planned, when it is."""
        planned: list[Fault | Level] = [*faults(self.seed, self.seconds, self.kinds)]
        planned += levels(self.seed, self.seconds)
        planned.sort(key=lambda each: each.at_s)
        began = time.monotonic()
        for each in planned:
            time.sleep(max(0.0, began + each.at_s - time.monotonic()))
            if isinstance(each, Fault):
                what = self._do(each)
                (self._missed if what is None else self._done)[each.kind] += 1
                self.say(f"{each.at_s:6.0f} s  {each.kind}: {what or 'nobody to hit'}")
            else:
                load.level = each.clients
                self.report.rises += each.clients > 1
                self.say(f"{each.at_s:6.0f} s  load: {each.clients} in flight")
        time.sleep(max(0.0, began + self.seconds - time.monotonic()))

    # -- faults -----------------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> str | None:
        """Do it; returns whom it hit."""
        if fault.kind == "kill_node":
            return self._kill_node(fault)
        titles = {f"kill_{role.replace(' ', '_')}": title for role, title in TITLES.items()}
        titles["kill_replica"] = f"{REPLICA}{APP}"
        if fault.kind in titles:
            found = {process.pid: process for process in self.cluster.processes(titles[fault.kind])}
            pids = [str(pid) for pid in sorted(found)]
        else:
            jobs = list(self._running.values())
            pids = [str(rank.pid) for job in jobs for rank in job.rank_processes()]
        hit = fault.of(pids)
        if hit is None:
            return None
        pid = int(hit)
        with suppress(ProcessLookupError):
            if fault.kind == "freeze_rank":
                os.kill(pid, signal.SIGSTOP)
                self._thaw_later(pid)
            else:
                os.kill(pid, signal.SIGTERM if fault.kind == "terminate_rank" else signal.SIGKILL)
        return f"process {pid}"

    def _thaw_later(self, pid: int) -> None:
        def thaw() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._later(FROZEN_S, thaw)

    def _kill_node(self, fault: Fault) -> str | None:
        node = fault.of(self._nodes)
        if node is None:
            return None
        self._nodes.remove(node)
        kill_node(self.cluster.record, node)

        def start() -> None:
            try:
                start_node(self.cluster.record, node)
                self._nodes.append(node)
                self.say(f"{node} is back")
            except Exception as error:  # noqa: BLE001  (whatever it is, it is a finding)
                self.report.wrong.append(f"{node}: {type(error).__name__}: {error}")

        self._later(AWAY_S, start)
        return f"all processes of {node}"

    def _later(self, seconds: float, mend: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, mend)
        timer.start()
        self._mends.append(timer)

    # -- the oracle -------------------------------------------------------------------------------------

    def _judge(self, reference: Mapping[str, Mapping[int, float]], load: SteadyLoad) -> None:
        report, wrong = self.report, self.report.wrong
        for timer in self._mends:
            timer.join()
        report.faults, report.missed = dict(self._done), dict(self._missed)
        report.requests = {"answered": len(load.answers), **Counter(map(oracle.outcome, load.failures))}
        report.reasons = dict(Counter(each.reason for each in load.failures).most_common(MOST_REASONS))
        for name, job in self._ended:
            lines, ends = job.metrics(), job.events("finished")
            status = ends[-1]["status"] if ends else "not ended"
            report.jobs[status] = report.jobs.get(status, 0) + 1
            if status != "succeeded":
                wrong.append(f"{job.job} has {status}: {ends[-1]['error'] if ends else ''}")
                continue
            report.steps += len({line["step"] for line in lines})
            report.steps_done_again += len(lines) - len({line["step"] for line in lines})
            report.attempts += lines[-1]["attempt"]
            report.resized += len(job.events("resized"))
            saved = {event["step"] for event in job.events("checkpointed")}
            # Who dies between a save and its event leaves a checkpoint that nobody has told of.
            saved |= {*range(0, STEPS[name], SAVE_EVERY)}
            losses = [
                (event["time"], event["group"])
                for event in job.events("failed", "leaving")
                if event.get("group") is not None
            ]
            # One that stands still is lost before it fails, and may come back without having failed.
            losses += [
                (event["time"], group)
                for event in job.events("resized")
                for group in (*event["lost"], *event["left"])
            ]
            wrong += oracle.check_steps(job.job, lines, STEPS[name], saved, losses)
            wrong += oracle.check_losses(job.job, lines, reference[name], TOLERANCE[name])
        wrong += oracle.check_requests(load.failures)
        record = self.cluster.record
        wrong += granted_twice(read_events(journal_storage(record.storage, record.name)))
        wrong += self._left()

    def _left(self) -> list[str]:
        """What is left of the jobs once all have ended."""
        from cluster.sharing.client import BrokerClient  # Ray reads its settings when it is imported

        wrong = ["it was never looked"]
        deadline = time.monotonic() + SETTLE_S
        while wrong and time.monotonic() < deadline:
            leases = [each for each in BrokerClient().leases() if each["kind"] == "training"]
            processes = [
                f"{title} ({process.pid})" for title in OF_JOBS for process in self.cluster.processes(title)
            ]
            files = [
                f"{job.run.location}/{scratch}"
                for _, job in self._ended
                for scratch in ("ray_train", "export")
                if job.run.exists(scratch)
            ]
            wrong = oracle.check_left(leases, processes, files)
            time.sleep(_LOOK_S)
        return wrong
