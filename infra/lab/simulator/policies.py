"""Who gets which devices: the three ways of sharing that are compared, all through `allocate`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from cluster.sharing.allocate import allocate
from cluster.sharing.demand import Demand, Grant, Node
from infra.lab.simulator.jobs import Job
from infra.lab.simulator.occupancy import DEVICE


@dataclass(frozen=True)
class Moment:
    """What a decision is made from.

    Attributes:
        since: when each holder asked first.
        promised: of what each holds, the indexes of units that start up or leave.
        training: those that run and those that wait, each in the order of the queue.
        overdue: jobs that have waited so long that nothing may start in their way any more.
        settling: jobs that changed a moment ago.
    """

    nodes: Sequence[Node]
    training: Sequence[Demand]
    serving: Sequence[Demand]
    since: Mapping[str, float]
    promised: Mapping[str, Collection[int]] = field(default_factory=dict)
    overdue: Collection[str] = ()
    settling: Collection[str] = ()


class SharingPolicy:
    """One way of sharing."""

    name: ClassVar[str]
    elastic: ClassVar[bool] = False
    """Whether jobs grow and shrink; otherwise each has the size that it asks for, or nothing."""
    reclaims: ClassVar[bool] = False
    """Whether serving may take the devices of whole jobs."""

    def template(self, job: Job) -> tuple[Demand, int]:
        """What a job asks for while it holds nothing, and the groups in one gang of that."""
        stretches = self.elastic and job.elastic
        gang_groups = 1 if stretches else job.groups
        gang = job.group * gang_groups // job.tensor
        least = job.min_groups * gang if stretches else 0 if self.reclaims else gang
        most = job.max_groups * gang if stretches else gang
        demand = Demand(
            job.name,
            "training",
            {DEVICE: float(job.tensor)},
            least,
            most,
            gang=gang,
            priority=job.priority,
            accelerator=job.accelerator,
        )
        return demand, gang_groups

    def decide(self, moment: Moment) -> dict[str, Grant]:
        """The grant of every holder."""
        return allocate(
            moment.nodes,
            [*moment.serving, *moment.training],
            "serving",
            since=moment.since,
            promised=moment.promised,
            overdue=moment.overdue,
            settling=moment.settling,
        )


@dataclass(frozen=True)
class FixedSplit(SharingPolicy):
    """Serving and training have nodes of their own; jobs start in order, smaller ones go before in gaps.

    Attributes:
        serving: ids of the nodes of serving.
    """

    serving: frozenset[str]
    name = "fixed"

    def decide(self, moment: Moment) -> dict[str, Grant]:
        mine = [node for node in moment.nodes if node.node_id in self.serving]
        others = [node for node in moment.nodes if node.node_id not in self.serving]
        since, promised = moment.since, moment.promised
        grants = allocate(mine, moment.serving, "serving", since=since, promised=promised)
        return grants | allocate(
            others, moment.training, "serving", since=since, promised=promised, overdue=moment.overdue
        )


class ServingFirst(SharingPolicy):
    """One cluster; jobs run on whatever serving leaves, and are stopped as a whole when it wants more.

    A job is a want without a minimum here, since a minimum is never taken back.
    """

    name = "serving-first"
    reclaims = True


@dataclass(frozen=True)
class Shoal(SharingPolicy):
    """One cluster, in which elastic jobs take what is idle and give it back group by group.

    Attributes:
        reserve: devices that the minimums of all jobs together leave alone, so that serving can have them
            whenever it wants to. Without it jobs may start on all that serving does not want at the
            moment, and no minimum is taken back.
    """

    reserve: int = 0
    name = "shoal"
    elastic = True

    def decide(self, moment: Moment) -> dict[str, Grant]:
        if not self.reserve:
            return super().decide(moment)
        left = sum(node.resources[DEVICE] for node in moment.nodes) - self.reserve
        admitted = []
        for demand in moment.training:
            least = demand.min * demand.unit[DEVICE]
            if demand.held or least <= left:
                admitted.append(demand)
                left -= least
        grants = super().decide(replace(moment, training=admitted))
        return {demand.holder: Grant(demand.holder) for demand in moment.training} | grants


NAMES = (FixedSplit.name, ServingFirst.name, Shoal.name)


def policy_of(name: str, nodes: Sequence[Node], serving_devices: int, reserve: int = 0) -> SharingPolicy:
    """The policy of this name; a fixed split gives serving the first nodes that have so many devices."""
    if name == Shoal.name:
        return Shoal(reserve)
    if name == FixedSplit.name:
        mine: set[str] = set()
        have = 0.0
        for node in nodes:
            if have >= serving_devices:
                break
            mine.add(node.node_id)
            have += node.resources[DEVICE]
        return FixedSplit(frozenset(mine))
    return ServingFirst()
