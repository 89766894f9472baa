"""What happens to the network between nodes, whose hosts are namespaces with cables of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.hosts.embedded.embedded_provider import EmbeddedProvider
from infra.lab.bench.own_cluster import OwnCluster, OwnJob
from infra.lab.faults.fault_course import longest_gap_s
from infra.lab.faults.laboratory import OTHER_ORDER, VICTIM, Laboratory, wait_between_checkpoints
from infra.lab.faults.processes import node_of
from infra.lab.faults.scenario import FaultOutcome, Scenario, Trial
from infra.lab.faults.scenarios.nodes import bring_back
from infra.lab.faults.scenarios.workers import lose_group, wait_for_groups
from infra.lab.hosts import network
from infra.lab.hosts.network import CabledNetwork, Way

_BRIEF_S = 5.0
_WORSE_S = 20.0
_LOSS = 0.01
_DELAY_S = 0.01


@dataclass(frozen=True)
class _Wired:
    """A cluster whose nodes are joined by cables."""

    cluster: OwnCluster
    network: CabledNetwork

    def place(self, node: str) -> int:
        """The place of a node among all, the head's first, which is that of its host."""
        return [each.name for each in self.cluster.record.nodes].index(node)

    def cut(self, node: str, *ways: Way) -> None:
        self.network.cut(self.place(node), *ways)

    def bring_back(self, node: str) -> None:
        """Mend all cables; the node, which its cluster has declared dead, is started again."""
        self.network.mend()
        bring_back(self.cluster, node, self.network.hosts.prefix(self.place(node)))


@contextmanager
def _wired(lab: Laboratory) -> Iterator[_Wired]:
    with (
        CabledNetwork(3, lab.directory) as network,
        lab.own_cluster(EmbeddedProvider(network.hosts)) as cluster,
    ):
        yield _Wired(cluster, network)


def _cut_off(*ways: Way) -> Callable[[Laboratory, int], FaultOutcome]:
    def run(lab: Laboratory, repeats: int) -> FaultOutcome:
        with _wired(lab) as wired:
            job = wired.cluster.submit("whole", lab.long_steps)
            trials, wrong = [], []
            for _ in range(repeats):
                trial = lab.trial(job, lambda: wired.cut(node_of(job, VICTIM), *ways))
                assert trial.node is not None, "a node was struck"
                if trial.node in {each["node"] for each in job.events("started")[-1]["ranks"]}:
                    wrong.append(f"the group started on {trial.node} again, which was cut off")
                trials.append(trial)
                wired.bring_back(trial.node)
            return FaultOutcome(trials, wrong + lab.wrong(job))

    return run


def _cut_off_group(*ways: Way) -> Callable[[Laboratory, int], FaultOutcome]:
    def run(lab: Laboratory, repeats: int) -> FaultOutcome:
        with _wired(lab) as wired:
            job = wired.cluster.submit("groups", lab.long_steps)
            trials = []
            for _ in range(repeats):
                wait_for_groups(job)
                trial = lose_group(job, lambda: wired.cut(node_of(job, 0), *ways))
                assert trial.node is not None, "a node was struck"
                trials.append(trial)
                wired.bring_back(trial.node)
            return FaultOutcome(trials, lab.wrong(job, OTHER_ORDER))

    return run


def cut_briefly(lab: Laboratory, repeats: int) -> FaultOutcome:
    """A cable is out for a few seconds; nothing fails, and no step is done again."""
    return _trouble(lab, repeats, _BRIEF_S, lambda wired, job: wired.cut(node_of(job, VICTIM)))


def be_worse(lab: Laboratory, repeats: int) -> FaultOutcome:
    """All cables lose and delay packets for a while; the job is slower, and that is all."""
    return _trouble(lab, repeats, _WORSE_S, lambda wired, _: wired.network.worsen(_LOSS, _DELAY_S))


def _trouble(
    lab: Laboratory, repeats: int, for_s: float, strike: Callable[[_Wired, OwnJob], None]
) -> FaultOutcome:
    with _wired(lab) as wired:
        job = wired.cluster.submit("whole")
        trials = []
        for _ in range(repeats):
            wait_between_checkpoints(job)
            began, before = time.time(), len(job.metrics())
            strike(wired, job)
            threading.Event().wait(for_s)
            meanwhile = len(job.metrics()) - before
            wired.network.mend()
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


def _each_way(
    name: str, then: str, cut: Callable[..., Callable[[Laboratory, int], FaultOutcome]]
) -> list[Scenario]:
    return [
        Scenario(f"{name}{suffix}", f"{what}, {then}", cut(*ways), network.missing, own_cluster=True)
        for suffix, what, ways in _WAYS
    ]


SCENARIOS = (
    *_each_way("node-cut", "with a rank of one group: it starts again on a spare node", _cut_off),
    *_each_way("group-cut", "with one of three replica groups: the others go on", _cut_off_group),
    Scenario(
        "cut-briefly",
        f"nothing gets through the cable of a node for {_BRIEF_S:.0f} s: the job stands, and goes on",
        cut_briefly,
        network.missing,
        own_cluster=True,
    ),
    Scenario(
        "packets-lost",
        f"for {_WORSE_S:.0f} s cables lose {_LOSS:.0%} of all packets and delay the others by"
        f" {_DELAY_S * 1000:.0f} ms: the job goes on, slower",
        be_worse,
        network.missing,
        own_cluster=True,
    ),
)
