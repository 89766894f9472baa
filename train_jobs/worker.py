"""What one rank of a group does inside Ray Train, from its first line to its last."""

from __future__ import annotations

import os
import traceback
from dataclasses import asdict
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from cluster.storage import Storage
from train_jobs.assembly import RankAssembly
from train_jobs.control import find_control
from train_jobs.elastic.lighthouse import LighthouseClient
from train_jobs.errors import RankError, ScriptError
from train_jobs.script import RankPlace, ScriptProcess, free_port, torchrun_environment
from train_jobs.spec import CHECKPOINTS, DATA, EXPORT, LOGS, GroupSpec
from train_jobs.workspace import Workspace


class ControlReporter:
    """Rank 0's line to the job's control actor; the other ranks' reporter is silent."""

    def __init__(self, job: str, rank: int) -> None:
        self.control = find_control(job) if rank == 0 else None
        self._answer: ray.ObjectRef | None = None

    def metric(self, line: dict[str, Any]) -> bool:
        """Send without waiting; the answer to the step before says whether the job is to stop."""
        if self.control is None:
            return False
        before, self._answer = self._answer, self.control.metric.remote(line)
        # The answer is as old as a whole step: this waits only where the actor cannot keep up with the steps.
        return before is not None and ray.get(before, timeout=60)["stop"]

    def missed_metric(self, line: dict[str, Any]) -> None:
        if self.control is not None:
            ray.get(self.control.missed_metric.remote(line), timeout=60)

    def event(self, kind: str, **facts: Any) -> None:
        if self.control is not None:
            ray.get(self.control.event.remote(kind, **facts), timeout=60)


def run_rank(spec: GroupSpec) -> str:
    """Train as one rank of a group: "finished" or "stopped".

    Raises:
        RankError: whatever went wrong, in a form that reaches the driver whole.
    """
    torch.set_num_threads(max(1, spec.config.workers.cpus))
    reporter = ControlReporter(spec.job, dist.get_rank())
    run = _ScriptRun(spec, reporter) if spec.config.task == "script" else _TaskRun(spec, reporter)
    try:
        return run.run()
    except Exception as error:  # noqa: BLE001  (whatever it is, the driver judges it)
        trace = error.output if isinstance(error, ScriptError) else traceback.format_exc()
        raise RankError(
            dist.get_rank(),
            run.step,
            type(error).__name__,
            str(error),
            trace,
            collective=is_collective(error),
        ) from None


class _TaskRun:
    """A rank of one of our own step loops."""

    def __init__(self, spec: GroupSpec, reporter: ControlReporter) -> None:
        self.spec = spec
        self.reporter = reporter
        self.assembly: RankAssembly | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return 0 if self.assembly is None else self.assembly.state.step

    def run(self) -> str:
        spec = self.spec
        device = ray.train.torch.get_device()
        self.reporter.event("entered", attempt=spec.attempt, group=spec.name)
        workspace = Workspace(Storage(spec.run))
        workspace.fetch(DATA)
        replica = (
            (spec.name, LighthouseClient(spec.job, spec.attempt))
            if spec.config.group_size is not None
            else None
        )
        assembly = RankAssembly(
            spec.config, workspace, spec.attempt, spec.nodes, self.reporter, device, replica
        )
        self.assembly = assembly
        step = assembly.begin()
        mesh, notes = asdict(assembly.mesh.shape), assembly.parallel.notes
        workers = assembly.quorum.world_size
        _say_started(spec, self.reporter, step=step, mesh=mesh, notes=notes, workers=workers)
        outcome = assembly.loop.run()
        if outcome != "finished":
            return outcome
        if not assembly.quorum.leads:
            return "followed"  # the job has finished when the leading group has exported the model
        assembly.export()
        return "finished"


class _ScriptRun:
    """A rank of a script of the user's, in a process of its own."""

    step = 0

    def __init__(self, spec: GroupSpec, reporter: ControlReporter) -> None:
        self.spec = spec
        self.reporter = reporter
        self.control = find_control(spec.job)

    def run(self) -> str:
        spec, context = self.spec, ray.train.get_context()
        place = RankPlace(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_rank=context.get_local_rank(),
            local_world_size=context.get_local_world_size(),
            node_rank=context.get_node_rank(),
            num_nodes=len(set(spec.nodes)),
        )
        host = ray.util.get_node_ip_address()
        master: list[Any] = [(host, free_port(host)) if place.rank == 0 else None]
        dist.broadcast_object_list(master)
        run = Workspace(Storage(spec.run)).directory
        environment = torchrun_environment(
            place, master[0], spec.job, spec.attempt, spec.config.workers.cpus
        ) | {
            "SHOAL_CHECKPOINT_DIR": str(run / CHECKPOINTS),
            "SHOAL_EXPORT_DIR": str(run / EXPORT),
        }
        _say_started(spec, self.reporter, step=0)
        log = run / LOGS / f"attempt-{spec.attempt}" / f"rank-{place.rank}.log"
        process = ScriptProcess(spec.config, environment, log)
        try:
            return process.wait(self._stop_asked)
        finally:
            process.kill()

    def _stop_asked(self) -> bool:
        return self.control is not None and ray.get(self.control.is_stopping.remote(), timeout=60)


_LOST_PEER = ("gloo/", "Connection closed by peer", "Connection reset by peer", "DistBackendError")
"""What a traceback says of a rank whose peer went away."""


def is_collective(error: BaseException) -> bool:
    """Whether an exception came out of torch.distributed: this rank lost a peer and made no mistake."""
    if isinstance(error, dist.DistError):
        return True
    if isinstance(error, ScriptError):
        return any(words in error.output for words in _LOST_PEER)
    # Gloo raises plain RuntimeErrors that name its own source files.
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_PEER)


def _say_started(spec: GroupSpec, reporter: ControlReporter, **facts: Any) -> None:
    context = ray.get_runtime_context()
    node = context.get_node_labels().get("shoal.io/node", context.get_node_id())
    mine = {"rank": dist.get_rank(), "node": node, "pid": os.getpid()}
    ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, mine)
    if spec.config.group_size is not None:
        facts["group"] = spec.name
    reporter.event("started", attempt=spec.attempt, world_size=len(ranks), **facts, ranks=ranks)
