"""What happens to whole nodes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from infra.lab.bench.own_cluster import OwnCluster, OwnJob
from infra.lab.faults import nodes
from infra.lab.faults.fault_course import resumption_beyond
from infra.lab.faults.laboratory import (
    OTHER_ORDER,
    VICTIM,
    Laboratory,
    wait_for,
)
from infra.lab.faults.processes import node_of
from infra.lab.faults.scenario import FaultOutcome, Scenario, Trial
from infra.lab.faults.scenarios.workers import GROUPS, lose_group, wait_for_groups


def lose_node(lab: Laboratory, repeats: int) -> FaultOutcome:
    """The raylet of a rank of one group is killed; another node is spare."""
    job = lab.cluster.submit("whole")
    trials, wrong = [], []
    for _ in range(repeats):
        trial = lab.trial(job, lambda: lab.cluster.raylet(node_of(job, VICTIM)).kill())
        trials.append(trial)
        lost = trial.node
        assert lost is not None, "a rank was struck"
        if lost in {each["node"] for each in job.events("started")[-1]["ranks"]}:
            wrong.append(f"the group started on {lost} again, which was gone")
        bring_back(lab.cluster, lost)
    return FaultOutcome(trials, wrong + lab.wrong(job))


def lose_node_of_groups(lab: Laboratory, repeats: int) -> FaultOutcome:
    """The raylet of a replica group is killed; the others go on."""
    return FaultOutcome(*_come_and_go(lab, repeats, lost=True))


def node_comes_back(lab: Laboratory, repeats: int) -> FaultOutcome:
    """From `ray start` of a node that had been lost to the first step of a group on it."""
    return FaultOutcome(*_come_and_go(lab, repeats, lost=False))


def _come_and_go(lab: Laboratory, repeats: int, *, lost: bool) -> tuple[list[Trial], list[str]]:
    job = lab.cluster.submit("groups")
    losses, returns = [], []
    for _ in range(repeats):
        wait_for_groups(job)
        node = node_of(job, 0)
        losses.append(lose_group(job, lab.cluster.raylet(node).kill))
        wait_for_groups(job, GROUPS - 1)
        returns.append(_return(lab.cluster, job, node))
    return losses if lost else returns, lab.wrong(job, OTHER_ORDER)


def _return(cluster: OwnCluster, job: OwnJob, node: str) -> Trial:
    before = len(job.events("resized"))
    began = time.time()
    nodes.start_node(cluster.record, node)
    joined = job.until(
        lambda: [each for each in job.events("resized")[before:] if each["joined"]],
        f"no group joined on {node}",
    )[0]
    went_on = job.until(lambda: resumption_beyond(job.metrics(), joined["step"]), "no step was done with it")
    return Trial(went_on.time - began, "its peers, at the same step", repeated=went_on.repeated)


def bring_back(cluster: OwnCluster, node: str, prefix: Sequence[str] = ()) -> None:
    """Start a node again, and wait until the cluster counts it; `prefix` comes before its command."""
    import ray

    nodes.kill_node(cluster.record, node)  # its raylet may have left agents
    nodes.start_node(cluster.record, node, prefix)
    (ip,) = [each.ip for each in cluster.record.nodes if each.name == node]
    wait_for(
        lambda: any(row["Alive"] and row["NodeManagerAddress"] == ip for row in ray.nodes()),
        f"node {node} did not come back",
    )


SCENARIOS = (
    Scenario(
        "node-lost",
        "SIGKILL of the raylet under a rank of one group: it starts again on a spare node",
        lose_node,
    ),
    Scenario(
        "group-node-lost",
        "SIGKILL of the raylet under one of three replica groups: the others go on",
        lose_node_of_groups,
    ),
    Scenario(
        "node-back",
        "a lost node is started again: from `ray start` to the first step of a group on it",
        node_comes_back,
    ),
)
