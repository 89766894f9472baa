"""What happens when a host loses its power, and when it is back."""

from __future__ import annotations

import time
from collections.abc import Callable

from infra.lab.bench.own_cluster import OwnJob
from infra.lab.faults.cluster_on_hosts import ClusterOnHosts
from infra.lab.faults.fault_course import resumption_beyond
from infra.lab.faults.laboratory import OTHER_ORDER, VICTIM, Laboratory
from infra.lab.faults.processes import node_of
from infra.lab.faults.scenario import ClusterUse, FaultOutcome, Scenario, Trial
from infra.lab.faults.scenarios.nodes import started_on
from infra.lab.faults.scenarios.workers import GROUPS, lose_group, wait_for_groups
from infra.lab.hosts import lan

Strike = Callable[[ClusterOnHosts, str], None]
"""Takes a host, by the name of its node, away from the cluster."""
Run = Callable[[Laboratory, int], FaultOutcome]


def lose_host(strike: Strike) -> Run:
    """That of a rank of one group, while another host is spare."""

    def run(lab: Laboratory, repeats: int) -> FaultOutcome:
        hosts = lab.on_hosts
        job = hosts.cluster.submit("whole", lab.long_steps)
        trials, wrong = [], []
        for _ in range(repeats):
            trial = lab.trial(job, lambda: strike(hosts, node_of(job, VICTIM)))
            assert trial.node is not None, "a node was struck"
            trials.append(trial)
            wrong += started_on(job, trial.node)
            hosts.bring_back(trial.node)
        return FaultOutcome(trials, wrong + lab.wrong(job))

    return run


def lose_host_of_groups(strike: Strike) -> Run:
    """That of one of three replica groups; the others go on."""

    def run(lab: Laboratory, repeats: int) -> FaultOutcome:
        hosts = lab.on_hosts
        job = hosts.cluster.submit("groups", lab.long_steps)
        trials = []
        for _ in range(repeats):
            wait_for_groups(job)
            trial = lose_group(job, lambda: strike(hosts, node_of(job, 0)))
            assert trial.node is not None, "a node was struck"
            trials.append(trial)
            hosts.bring_back(trial.node)
        return FaultOutcome(trials, lab.wrong(job, OTHER_ORDER))

    return run


def come_back(lab: Laboratory, repeats: int) -> FaultOutcome:
    """From `ray start` on a host that had lost its power to the first step of a group on it."""
    hosts = lab.on_hosts
    job = hosts.cluster.submit("groups", lab.long_steps)
    trials = []
    for _ in range(repeats):
        wait_for_groups(job)
        node = node_of(job, 0)
        hosts.cut_power(node)
        wait_for_groups(job, GROUPS - 1)
        hosts.boot(node)
        trials.append(_return(hosts, job, node))
    return FaultOutcome(trials, lab.wrong(job, OTHER_ORDER))


def _return(hosts: ClusterOnHosts, job: OwnJob, node: str) -> Trial:
    before = len(job.events("resized"))
    began = time.time()
    hosts.start_node(node)
    joined = job.until(
        lambda: [each for each in job.events("resized")[before:] if each["joined"]],
        f"no group joined on {node}",
    )[0]
    went_on = job.until(lambda: resumption_beyond(job.metrics(), joined["step"]), "no step was done with it")
    return Trial(went_on.time - began, "its peers, at the same step", repeated=went_on.repeated)


SCENARIOS = (
    Scenario(
        "node-power-cut",
        "the host of a rank of one group loses its power: it starts again on a spare node",
        lose_host(ClusterOnHosts.cut_power),
        lan.missing,
        ClusterUse.HOSTS,
    ),
    Scenario(
        "group-power-cut",
        "the host of one of three replica groups loses its power: the others go on",
        lose_host_of_groups(ClusterOnHosts.cut_power),
        lan.missing,
        ClusterUse.HOSTS,
    ),
    Scenario(
        "node-back",
        "a host that had lost its power is back: from `ray start` to the first step of a group on it",
        come_back,
        lan.missing,
        ClusterUse.HOSTS,
    ),
)
