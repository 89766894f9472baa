"""Which process of a cluster is whose: those that faults are done to.

Ray's titles of its processes are private; the faults find nobody to hit when they change. Shoal's own begin
with `shoal::`.
"""

from __future__ import annotations

from typing import Any

import psutil

from cluster.errors import ShoalError
from infra.lab.bench.own_cluster import OwnCluster, OwnJob

TITLES = {
    "worker": "ray::RayTrainWorker",
    "controller": "ray::GroupRunner",
    "agent": "ray::JobAgent",
    "fork server": "shoal::ForkServer:ranks",
    "rank": "shoal::Rank:",
    "data": "shoal::ForkServer:data",
    "control": "ray::JobControl",
    "lighthouse": "ray::Lighthouse",
    "store": "shoal::Store",
    "store's fork server": "shoal::ForkServer:store",
    "driver": "-m train_jobs ",
    "broker": "ray::Broker",
}
"""What stands in the command line of the processes that carry a job."""
OF_JOBS = tuple(title for role, title in TITLES.items() if role != "broker")
"""Those that a job brings with it, and that end with it."""
OF_NODES = "node_fork_server.main()"
"""Of the nodes' own fork servers, which name the modules of jobs, and stay."""
OF_RAY_TRAIN = ("ray::RayTrain", "ray::GroupRunner", "ray::PlacementGroup", "ray::SynchronizationActor")
"""Those that a training run of Ray's brings with it."""
REPLICA = "ray::ServeReplica:"
"""Of the replicas of Serve's applications; the application's name follows."""


def newest_ranks(job: OwnJob) -> list[dict[str, Any]]:
    """The ranks of the group that has started last: rank, node and pid each."""
    return list(job.events("started")[-1]["ranks"])


def rank_process(job: OwnJob, rank: int) -> psutil.Process:
    """The process of a rank of the group that has started last.

    Raises:
        ShoalError: it has ended.
    """
    (found,) = [each for each in newest_ranks(job) if each["rank"] == rank]
    process = job.cluster.process(found["node"], found["pid"])
    if process is None:
        raise ShoalError(f"rank {rank} of {job.job} has ended: {found}")
    return process


def node_of(job: OwnJob, rank: int) -> str:
    """The name of the node that this rank is on."""
    (node,) = [each["node"] for each in newest_ranks(job) if each["rank"] == rank]
    return str(node)


def process_of(cluster: OwnCluster, role: str, node: str | None = None) -> psutil.Process:
    """The process of a role of TITLES; on a node, where each may have one.

    Raises:
        ShoalError: there is none.
    """
    found = cluster.processes(TITLES[role], node)
    if not found:
        raise ShoalError(f"there is no process {TITLES[role]}{f' on {node}' if node else ''}")
    return found[0]
