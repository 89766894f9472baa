"""What happens when a node's raylet dies, and its machine lives on."""

from __future__ import annotations

from infra.lab.bench.own_cluster import OwnCluster, OwnJob
from infra.lab.faults import nodes
from infra.lab.faults.laboratory import OTHER_ORDER, VICTIM, Laboratory
from infra.lab.faults.processes import newest_ranks, node_of
from infra.lab.faults.scenario import FaultOutcome, Scenario
from infra.lab.faults.scenarios.workers import lose_group, wait_for_groups
from infra.lab.faults.waiting import wait_for


def lose_node(lab: Laboratory, repeats: int) -> FaultOutcome:
    """The raylet of a rank of one group is killed; another node is spare."""
    job = lab.cluster.submit("whole")
    trials, wrong = [], []
    for _ in range(repeats):
        trial = lab.trial(job, lambda: lab.cluster.raylet(node_of(job, VICTIM)).kill())
        assert trial.node is not None, "a node was struck"
        trials.append(trial)
        wrong += started_on(job, trial.node)
        _bring_back(lab.cluster, trial.node)
    return FaultOutcome(trials, wrong + lab.wrong(job))


def lose_node_of_groups(lab: Laboratory, repeats: int) -> FaultOutcome:
    """The raylet of a replica group is killed; the others go on."""
    job = lab.cluster.submit("groups")
    trials = []
    for _ in range(repeats):
        wait_for_groups(job)
        trial = lose_group(job, lambda: lab.cluster.raylet(node_of(job, 0)).kill())
        assert trial.node is not None, "a node was struck"
        trials.append(trial)
        _bring_back(lab.cluster, trial.node)
    return FaultOutcome(trials, lab.wrong(job, OTHER_ORDER))


def started_on(job: OwnJob, lost: str) -> list[str]:
    """What is wrong when the newest group stands on a node that was lost."""
    there = lost in {each["node"] for each in newest_ranks(job)}
    return [f"the group started on {lost} again, which was gone"] if there else []


def _bring_back(cluster: OwnCluster, node: str) -> None:
    """Start a node again, and wait until the cluster counts it."""
    import ray

    nodes.kill_node(cluster.record, node)  # its raylet may have left agents
    nodes.start_node(cluster.record, node)
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
)
