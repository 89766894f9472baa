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

from train_jobs.assembly import RankAssembly
from train_jobs.control import find_control
from train_jobs.errors import RankError
from train_jobs.spec import GroupSpec


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

    def event(self, kind: str, **facts: Any) -> None:
        if self.control is not None:
            ray.get(self.control.event.remote(kind, **facts), timeout=60)


def run_rank(spec: GroupSpec) -> str:
    """Train as one rank of a group: "finished" or "stopped".

    Raises:
        RankError: whatever went wrong, in a form that reaches the driver whole.
    """
    torch.set_num_threads(max(1, spec.config.workers.cpus))
    rank = dist.get_rank()
    reporter = ControlReporter(spec.job, rank)
    assembly: RankAssembly | None = None
    try:
        assembly = RankAssembly(
            spec.config, spec.run, spec.attempt, spec.nodes, reporter, ray.train.torch.get_device()
        )
        step = assembly.restore()
        _say_started(spec, reporter, step, assembly)
        outcome = assembly.loop.run()
        if outcome == "finished":
            assembly.export()
        return outcome
    except Exception as error:  # noqa: BLE001  (whatever it is, the driver judges it)
        raise RankError(
            rank,
            0 if assembly is None else assembly.state.step,
            type(error).__name__,
            str(error),
            traceback.format_exc(),
            collective=is_collective(error),
        ) from None


def is_collective(error: BaseException) -> bool:
    """Whether an exception came out of torch.distributed: this rank lost a peer and made no mistake."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    # Gloo raises plain RuntimeErrors that name its own source files.
    return isinstance(error, RuntimeError) and ("gloo/" in text or "Connection closed by peer" in text)


def _say_started(spec: GroupSpec, reporter: ControlReporter, step: int, assembly: RankAssembly) -> None:
    context = ray.get_runtime_context()
    node = context.get_node_labels().get("shoal.io/node", context.get_node_id())
    mine = {"rank": dist.get_rank(), "node": node, "pid": os.getpid()}
    ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, mine)
    reporter.event(
        "started",
        attempt=spec.attempt,
        world_size=len(ranks),
        step=step,
        mesh=asdict(assembly.mesh.shape),
        notes=assembly.parallel.notes,
        ranks=ranks,
    )
