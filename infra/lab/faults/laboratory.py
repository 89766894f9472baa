"""The cluster that faults are done to, the jobs on it, and the undisturbed run that they are held to."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.config.sections.train import RecoveryConfig
from infra.lab.bench.own_cluster import OwnCluster, OwnJob, uninterrupted
from infra.lab.faults.cluster_on_hosts import WORKERS, ClusterOnHosts
from infra.lab.faults.fault_course import Resumption, resumption, seconds, wrong_losses, wrong_steps
from infra.lab.faults.processes import OF_JOBS, OF_NODES, OF_RAY_TRAIN, node_of
from infra.lab.faults.scenario import Trial
from infra.lab.faults.task import Order, order_path

HEARTBEAT_TIMEOUT_S = RecoveryConfig().heartbeat_timeout_s
HANG_TIMEOUT_S = 15.0
VICTIM = 1
"""The rank of one group that faults strike: not the one that writes the logs."""
EVERY_STEPS = 25
"""Between two checkpoints."""
WITHIN_STEPS = 8
"""So many steps after a checkpoint, or more, faults strike: there is something to do again."""
OPTIMIZER = {"name": "sgd", "learning_rate": 2.0e-3, "momentum": 0.9, "weight_decay": 0.0}
"""What rounding makes of a step fades. Adam, whose steps are as long however small the gradients have become,
makes ever more of it: after 12,000 steps here, all there can be.
"""
OTHER_ORDER = 5e-6
"""Tolerance of the root of a loss whose gradients were summed in another order (float32, targets near one).

The order alone made 1e-7, after 3,000 steps as after 500. A gradient that counted twice, once, made some
hundred times the tolerance in the next steps (tests/infra/lab/faults/test_tolerance.py).
"""
LONG_PAUSE_S = 0.3
"""What a step takes at least in scenarios of minutes, where others would do ten thousand steps."""
_REFERENCE_STEPS = 250
PAUSE_S = 0.04
"""What a step takes at least."""

NODES = [{"name": "head", "cpus": 0}, *({"name": name, "cpus": 1} for name in WORKERS)]
"""Three nodes of one worker: one is spare beside a job of two workers."""


def job_config(orders: Path) -> dict[str, Any]:
    """A job whose steps take some 50 ms; its losses depend on nothing but the step."""
    return {
        "task": "infra.lab.faults.task:Task",
        "settings": {"pause_s": PAUSE_S, "orders": str(orders)},
        "parallel": {"strategy": "fsdp"},
        "workers": {"min": 2, "max": 2},
        "batch": {"global": 12, "micro": 6},
        "optimizer": {**OPTIMIZER, "schedule": "constant"},
        "steps": 1_000_000,
        "evaluate": {"every_steps": None},
        "checkpoint": {"every_steps": EVERY_STEPS, "keep": 3},
        # Scenarios strike ten times and more, sometimes before the job has got further.
        "recovery": {"hang_timeout_s": HANG_TIMEOUT_S, "hangs": 100, "memory_failures": 100},
    }


def config_of(orders: Path, **cluster: Any) -> dict[str, Any]:
    """The sections of a `shoal.yaml`: a job of one group and one of several.

    Args:
        cluster: further keys of the section `cluster`.
    """
    whole = job_config(orders)
    groups = {
        **whole,
        "parallel": {"strategy": "ddp"},
        "workers": {"min": 1, "max": 3, "group": 1},
        "batch": {"global": 12, "micro": 4},
    }
    sharing = {"avoid_after": 0, "reclaim_grace_s": 5.0}  # nodes whose ranks are killed stay in use
    return {
        "cluster": {"nodes": NODES, "sharing": sharing, **cluster},
        "train_jobs": {"whole": whole, "groups": groups},
    }


class Laboratory:
    """One cluster on this machine and one on hosts for all scenarios that leave them whole; each is up when
    it is needed, and only one at a time.

    Args:
        say: takes each sentence about what happens.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.directory = Path()
        self._cluster: OwnCluster | None = None
        self._on_hosts: ClusterOnHosts | None = None
        self._up = ExitStack()
        self._ends = ExitStack()
        self._undisturbed: dict[int, float] = {}

    def __enter__(self) -> Laboratory:
        self.directory = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="shoal-faults-")))
        self.orders.mkdir(parents=True)
        self._ends.callback(self.down)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def shared(self) -> Path:
        """A directory that hosts see in the same place."""
        return self.directory / "shared"

    @property
    def orders(self) -> Path:
        """Where orders to ranks lie."""
        return self.shared / "orders"

    @property
    def long_steps(self) -> dict[str, Any]:
        """What of a job's config makes its steps take LONG_PAUSE_S."""
        return {"settings": {"pause_s": LONG_PAUSE_S, "orders": str(self.orders)}}

    @property
    def cluster(self) -> OwnCluster:
        """The shared cluster on this machine."""
        if self._cluster is None:
            self.down()
            self._cluster = self._up.enter_context(OwnCluster(config_of(self.orders), self.say))
        return self._cluster

    @property
    def on_hosts(self) -> ClusterOnHosts:
        """The shared cluster on hosts."""
        if self._on_hosts is None:
            self.down()
            self._on_hosts = self._up.enter_context(
                ClusterOnHosts(config_of(self.orders), self.shared, self.directory, self.say)
            )
        return self._on_hosts

    def down(self) -> None:
        """End the shared cluster that is up; the next one to need it has another."""
        self._cluster = self._on_hosts = None
        with uninterrupted():
            self._up.close()

    @contextmanager
    def own_cluster(self, **section: Any) -> Iterator[OwnCluster]:
        """Another cluster, instead of the shared one; `section` are keys of its `cluster`."""
        self.down()
        with OwnCluster(config_of(self.orders, **section), self.say) as cluster:
            yield cluster

    # -- jobs -------------------------------------------------------------------------------------------

    def order(self, rank: int, order: Order) -> None:
        """Tell a rank what to do in its next micro-batch."""
        path = order_path(self.orders, rank)
        beside = path.with_suffix(".new")
        beside.write_text(order)
        beside.rename(path)

    def trial(self, job: OwnJob, cause: Callable[[], object]) -> Trial:
        """Strike rank VICTIM of a job of one group, which has to go back for it, and see how it goes on."""
        wait_between_checkpoints(job)
        node = node_of(job, VICTIM)
        attempt, failures = job.metrics()[-1]["attempt"], len(job.events("failed"))
        began = time.time()
        cause()
        went_on: Resumption = job.until(
            lambda: resumption(job.metrics(), attempt + 1), "no step was done after the fault"
        )
        failed = job.events("failed")[failures:]
        return Trial(
            seconds=went_on.time - began,
            state=state_of(job, went_on),
            found_s=seconds(failed[0]) - began if failed else None,
            failure=finding(failed[0]) if failed else None,
            node=node,
            repeated=went_on.repeated,
            lost=went_on.lost,
        )

    # -- what must hold ---------------------------------------------------------------------------------

    def wrong(
        self,
        job: OwnJob,
        tolerance: float = 0.0,
        *,
        logged_twice: bool = False,
        before_step: float = math.inf,
    ) -> list[str]:
        """Stop a job; what must not be in its logs, or be left of it.

        Args:
            logged_twice: a line that was on its way to the logs may stand there twice.
            before_step: from this step on its losses are others than the undisturbed run's.
        """
        job.stop()
        lines = job.metrics()
        if logged_twice:
            lines = [line for before, line in pairwise([{}, *lines]) if not _same_line(before, line)]
        saved = [event["step"] for event in job.events("checkpointed")]
        back = [event["to"] for event in job.events("went_back")]
        same = [line for line in lines if line["step"] < before_step]
        undisturbed = self.undisturbed(max(line["step"] for line in same), job.cluster)
        return [
            *wrong_steps(lines, saved, back),
            *wrong_losses(same, undisturbed, tolerance),
            *left_behind(job.cluster),
        ]

    def undisturbed(self, steps: int, cluster: OwnCluster) -> Mapping[int, float]:
        """The loss of every step, of a run that nothing happened to."""
        if len(self._undisturbed) < steps:
            wanted = -(-steps // _REFERENCE_STEPS) * _REFERENCE_STEPS
            self.say(f"{wanted} steps undisturbed, to compare with")
            settings = {"pause_s": 0.0, "orders": str(self.orders)}
            saves = {"every_steps": wanted, "keep": 1}
            job = cluster.submit("whole", {"steps": wanted, "settings": settings, "checkpoint": saves})
            job.until(
                lambda: job.events("finished"),
                "the undisturbed run did not end",
                timeout_s=60.0 + 0.1 * wanted,
            )
            self._undisturbed = {line["step"]: line["loss"] for line in job.metrics()}
        return self._undisturbed


def _same_line(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two lines tell of one and the same step, at whatever time they were written."""
    return {**one, "time": None} == {**other, "time": None}


def wait_between_checkpoints(job: OwnJob) -> None:
    """Wait until this attempt has saved, and has done some steps since, with some to go to the next save."""

    def ready() -> bool:
        lines, saved = job.metrics(), job.events("checkpointed")
        if not lines or not saved:
            return False
        step, last = lines[-1]["step"], saved[-1]["step"]
        started = job.events("started")[-1]
        in_this_attempt = started["attempt"] == lines[-1]["attempt"] and last > started["step"]
        return in_this_attempt and WITHIN_STEPS <= step - last <= EVERY_STEPS - WITHIN_STEPS

    job.until(ready, "no checkpoint was saved")


def state_of(job: OwnJob, went_on: Resumption) -> str:
    """The state that a job went on from, in words."""
    if went_on.repeated == 0 and went_on.from_step % EVERY_STEPS:
        return "its peers, at the same step"
    saved = [event["step"] for event in job.events("checkpointed") if event["step"] <= went_on.from_step]
    return "checkpoint" if went_on.from_step in saved else f"step {went_on.from_step}"


def finding(failed: Mapping[str, Any]) -> dict[str, Any]:
    """What a job says of a failure: its class, the rank and the node."""
    return {key: failed[key] for key in ("failure_class", "rank", "node")}


def median_step_s(job: OwnJob) -> float:
    return statistics.median(line["step_s"] for line in job.metrics() if not line.get("profiled"))


def left_behind(cluster: OwnCluster, timeout_s: float = 30.0) -> list[str]:
    """What is left of jobs that have ended, once it has had time to go: leases and processes."""
    from cluster.sharing.client import BrokerClient

    words = dict.fromkeys((*OF_RAY_TRAIN, *OF_JOBS, "train_jobs"))
    deadline = time.monotonic() + timeout_s
    while True:
        left = [f"the lease of {lease['holder']} is left" for lease in BrokerClient().leases()]
        of_nodes = {process.pid for process in cluster.processes(OF_NODES)}
        left += [
            f"a process {each} is left"
            for each in words
            if {process.pid for process in cluster.processes(each)} - of_nodes
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
