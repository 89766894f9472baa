"""What a rank tells of itself: the start of its group, its metrics and events, and its errors."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from train_jobs.errors import ScriptError
from train_jobs.rank.link import RankOrder, Worker
from train_jobs.rank.loop import Reporter


class _WorkerReporter:
    """Rank 0's line to the job's logs."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def metric(self, line: dict[str, Any]) -> bool:
        return self.worker.metric(line)

    def event(self, kind: str, **facts: Any) -> None:
        self.worker.event(kind, facts)


class _Silent:
    """What the other ranks would say is what rank 0 says."""

    def metric(self, line: dict[str, Any]) -> bool:
        return False

    def event(self, kind: str, **facts: Any) -> None: ...


def reporter_of(order: RankOrder, worker: Worker) -> Reporter:
    """Rank 0 speaks for all."""
    return _WorkerReporter(worker) if order.place.rank == 0 else _Silent()


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


def say_started(order: RankOrder, reporter: Reporter, **facts: Any) -> None:
    """Tell that all ranks of the group have met, and where each of them is; a collective."""
    mine = {"rank": order.place.rank, "node": order.node, "pid": os.getpid()}
    ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, mine)
    if order.spec.config.group_size is not None:
        facts["group"] = order.spec.name
    reporter.event("started", attempt=order.spec.attempt, world_size=len(ranks), **facts, ranks=ranks)
