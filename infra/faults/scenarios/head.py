"""What happens when the head dies, with every driver on it."""

from __future__ import annotations

import time

from cluster.connection import disconnect
from infra.bench.own_cluster import OwnCluster, OwnJob
from infra.faults import nodes
from infra.faults.course import resumption
from infra.faults.laboratory import Laboratory, state_of, wait_between_checkpoints, wait_until
from infra.faults.scenario import Outcome, Scenario, Trial

_SURVIVES_S = 20.0
"""How long workers whose head is gone are watched."""


def lose_head(lab: Laboratory, repeats: int) -> Outcome:
    """Without a control store that outlives it: a clear end, then `shoal up` and `shoal resume`."""
    with lab.own_cluster() as cluster:
        job = cluster.submit("whole")
        trials = [_lose_head(cluster, job) for _ in range(repeats)]
        return Outcome(trials, lab.wrong(job))


def _lose_head(cluster: OwnCluster, job: OwnJob) -> Trial:
    wait_between_checkpoints(job)
    attempt = job.metrics()[-1]["attempt"]
    disconnect()  # Ray ends a process whose cluster is gone
    began = time.time()
    nodes.kill_head(cluster.record)
    wait_until(lambda: job.status() == "failed", "nobody says that the job has failed")
    said = time.time() - began
    cluster.up_again()
    up = time.time() - began
    job.resume()
    went_on = job.until(lambda: resumption(job.metrics(), attempt + 1), "no step was done after `resume`")
    seen = f"`shoal jobs` said failed after {said:.1f} s, `shoal up` was done after {up:.1f} s"
    return Trial(
        went_on.time - began, state_of(job, went_on), said, None, went_on.repeated, went_on.lost, seen
    )


SCENARIOS = (
    Scenario(
        "head-lost",
        "SIGKILL of all of the head, without Redis: the job has failed; `shoal up` and `shoal resume`",
        lose_head,
        own_cluster=True,
    ),
)
