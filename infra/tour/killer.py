"""Who kills a worker of the tour's job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from infra.job_view import JobView
from infra.tour.tour_config import JOB
from train_jobs.records.run_log import RunSummary

VICTIM = 1
"""The rank that is killed."""


class Hand:
    """An actor on the node where a process is to be killed."""

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)


class Killer(JobView):
    """Watches a job, and kills one of its workers with SIGKILL when the job is half-way.

    Needs a connection to the cluster: the worker may be on any of its nodes.
    """

    def __init__(self, steps: int, say: Callable[[str], None]) -> None:
        super().__init__(JOB, steps)
        self.say = say
        self.pid = 0
        self._hand: Any = None
        self.killed_at: int | None = None
        self.killed_time = 0.0
        self.first_step_again_s: float | None = None

    def line(self, text: str) -> None:
        self.say(text)

    def event(self, event: dict[str, Any], summary: RunSummary) -> None:
        if event["kind"] == "started":
            (victim,) = [rank for rank in event["ranks"] if rank["rank"] == VICTIM]
            self.pid = victim["pid"]
            if self.killed_at is None:
                self._hand = _hand_on(victim["node"])  # it starts up meanwhile
        super().event(event, summary)

    def metric(self, line: dict[str, Any], summary: RunSummary) -> None:
        super().metric(line, summary)
        if line["attempt"] > 1 and self.killed_at is not None and self.first_step_again_s is None:
            self.first_step_again_s = time.monotonic() - self.killed_time
        # Not just after a checkpoint: some steps should have to be run again.
        if self.killed_at is None and line["step"] >= self.steps // 2 + 5:
            self.killed_at, self.killed_time = line["step"], time.monotonic()
            self.say(f"killing rank {VICTIM} (process {self.pid}) with SIGKILL at step {line['step']}")
            self._hand.kill.remote(self.pid)


def _hand_on(node: str) -> Any:
    """A hand on the node of this name."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cluster.state.nodes import node_states

    (node_id,) = [state.node_id for state in node_states() if state.name == node and state.alive]
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0)(Hand).options(scheduling_strategy=strategy).remote()
