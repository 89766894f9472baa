"""What happens to the cables between hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from infra.lab.bench.own_cluster import OwnJob
from infra.lab.faults.cluster_on_hosts import ClusterOnHosts
from infra.lab.faults.fault_course import longest_gap_s
from infra.lab.faults.laboratory import VICTIM, Laboratory, wait_between_checkpoints
from infra.lab.faults.processes import node_of
from infra.lab.faults.scenario import ClusterUse, FaultOutcome, Scenario, Trial
from infra.lab.faults.scenarios.power import Run, Strike, lose_host, lose_host_of_groups
from infra.lab.hosts import lan
from infra.lab.hosts.network import Way

_BRIEF_S = 5.0
_WORSE_S = 20.0
_LOSS = 0.01
_DELAY_S = 0.01


def _cut(*ways: Way) -> Strike:
    return lambda hosts, node: hosts.cut(node, *ways)


def cut_briefly(lab: Laboratory, repeats: int) -> FaultOutcome:
    """A cable is out for a few seconds; nothing fails, and no step is done again."""
    return _trouble(lab, repeats, _BRIEF_S, lambda hosts, job: hosts.cut(node_of(job, VICTIM)))


def be_worse(lab: Laboratory, repeats: int) -> FaultOutcome:
    """All cables lose and delay packets for a while; the job is slower, and that is all."""
    return _trouble(lab, repeats, _WORSE_S, lambda hosts, _: hosts.worsen(_LOSS, _DELAY_S))


def _trouble(
    lab: Laboratory, repeats: int, for_s: float, strike: Callable[[ClusterOnHosts, OwnJob], None]
) -> FaultOutcome:
    hosts = lab.on_hosts
    job = hosts.cluster.submit("whole")
    trials = []
    for _ in range(repeats):
        wait_between_checkpoints(job)
        began, before = time.time(), len(job.metrics())
        strike(hosts, job)
        threading.Event().wait(for_s)
        meanwhile = len(job.metrics()) - before
        hosts.mend()
        job.until_steps(20)
        stood = longest_gap_s(job.metrics(), began)
        trials.append(Trial(stood, "where it was", seen=f"{meanwhile} steps in {for_s:.0f} s of it"))
    failures = [f"attempt {each['attempt']} failed: {each['reason']}" for each in job.events("failed")]
    return FaultOutcome(trials, failures + lab.wrong(job))


_WAYS: tuple[tuple[str, str, tuple[Way, ...]], ...] = (
    ("", "nothing gets through the cable of a node", ()),
    ("-out", "nothing that a node sends gets through its cable", (Way.OUT,)),
    ("-in", "nothing that is sent to a node gets through its cable", (Way.IN,)),
)


def _each_way(name: str, then: str, lose: Callable[[Strike], Run]) -> list[Scenario]:
    return [
        Scenario(f"{name}{suffix}", f"{what}, {then}", lose(_cut(*ways)), lan.missing, ClusterUse.HOSTS)
        for suffix, what, ways in _WAYS
    ]


SCENARIOS = (
    *_each_way("node-cut", "with a rank of one group: it starts again on a spare node", lose_host),
    *_each_way("group-cut", "with one of three replica groups: the others go on", lose_host_of_groups),
    Scenario(
        "cut-briefly",
        f"nothing gets through the cable of a node for {_BRIEF_S:.0f} s: the job stands, and goes on",
        cut_briefly,
        lan.missing,
        ClusterUse.HOSTS,
    ),
    Scenario(
        "packets-lost",
        f"for {_WORSE_S:.0f} s cables lose {_LOSS:.0%} of all packets and delay the others by"
        f" {_DELAY_S * 1000:.0f} ms: the job goes on, slower",
        be_worse,
        lan.missing,
        ClusterUse.HOSTS,
    ),
)
