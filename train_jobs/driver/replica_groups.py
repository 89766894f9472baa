"""Starts, ends and replaces the replica groups of one attempt, as its grant and their failures have it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import ray

from cluster.files.storage import Storage
from cluster.sharing.demand import Grant
from cluster.state.nodes import alive_nodes
from train_jobs.driver.departure import Departure
from train_jobs.driver.job_lease import RENEW_S, JobLease
from train_jobs.driver.roster import Gang, compare, gangs_of
from train_jobs.elastic.lighthouse import LighthouseClient, start_lighthouse
from train_jobs.elastic.membership import View
from train_jobs.group.group import Group, first_ended
from train_jobs.group.job_agents import JobAgents
from train_jobs.group.outcome import GroupOutcome
from train_jobs.group.standing_by import StandingBy
from train_jobs.spec import GroupSpec

_LAST_S = 60.0
"""How long the other groups may take to end once one of them has saved or exported what there is."""
_RANKING = ("finished", "stopped", "failed", "followed", "left")
"""Whose end is that of all groups."""


class ReplicaGroupsJob(Protocol):
    """What the supervisor needs of the driver."""

    def group_at(self, index: int, units: Sequence[str]) -> GroupSpec:
        """One more group of this attempt, on these nodes."""

    def judge(self, spec: GroupSpec, outcome: GroupOutcome, in_vain: int) -> float:
        """Log a failure; returns how long to wait before the group is started again.

        Args:
            in_vain: how often in a row groups in its place have failed before they took part.

        Raises:
            ShoalError: the job may not go on.
        """

    def event(self, kind: str, **facts: object) -> None: ...

    def has_started(self, attempt: int) -> bool:
        """Whether all ranks of a group of an attempt have met, and have their state."""

    def is_saving(self, group: str) -> bool:
        """Whether ranks of a group write to the storage now."""

    def ask_to_stop(self) -> bool:
        """Whether the job is to stop; if so, its ranks are told."""


@dataclass
class _Running:
    group: Group
    gang: Gang
    departure: Departure | None = None
    """Of a group that was asked to leave."""
    taken_down: bool = False


class ReplicaGroups:
    """The groups of one attempt.

    Args:
        name: the job's id.
        own: where Ray Train keeps what is its own.
        grace_s: how long a group that has to leave may take.
        standing_by: workers that wait for a group; here others come to stand by, and all end.
    """

    def __init__(
        self,
        job: ReplicaGroupsJob,
        lease: JobLease,
        name: str,
        *,
        own: Storage,
        agents: JobAgents,
        grace_s: float,
        heartbeat_timeout_s: float,
        standing_by: StandingBy,
    ) -> None:
        assert lease.units is not None, "the job has replica groups"
        self.job = job
        self.lease = lease
        self.name = name
        self.units = lease.units
        self.own = own
        self.agents = agents
        self.grace_s = grace_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.running: dict[str, _Running] = {}
        self._standing_by = standing_by
        """What groups have left on their nodes, with which the next ones start seconds sooner."""
        self._started = 0
        self._not_before: dict[Gang, float] = {}
        self._took_part: set[str] = set()
        self._in_vain: dict[Gang, int] = {}
        """How often in a row groups on these nodes have failed before they took part."""
        self._ending = False
        """The last step is done, or the job is stopped: nobody starts any more."""
        self._done: float | None = None
        """When a group had saved or exported what there is."""

    def run(self, grant: Grant) -> tuple[GroupSpec, GroupOutcome]:
        """Run groups until the job is done, is stopped, or has none left; returns the last to end."""
        specs = [self._spec(gang) for gang in gangs_of(grant.nodes, self.units)]
        self._attempt, names = specs[0].attempt, [spec.name for spec in specs]
        lighthouse = self._standing_by.lighthouses.pop(self._attempt, None)
        ready = lighthouse is not None
        if not ready:
            lighthouse = start_lighthouse(self.name, self._attempt, names, self.heartbeat_timeout_s)
        try:
            self.lighthouse = LighthouseClient(self.name, self._attempt)
            if ready:
                self.lighthouse.expect(names)
            for spec in specs:
                self._start(spec)
            return self._supervise()
        finally:
            for each in self.running.values():
                each.group.kill()
            self._standing_by.only(())
            ray.kill(lighthouse)

    def _supervise(self) -> tuple[GroupSpec, GroupOutcome]:
        last: list[tuple[GroupSpec, GroupOutcome]] = []  # the last to end; all of them once the job ends
        while True:
            groups = [each.group for each in self.running.values()]
            ended = first_ended(groups, RENEW_S, self.lease.news)
            if ended is not None:
                end = ended.spec, self._end(ended)
                last = [*last, end] if self._ending else [end]
                self._look_at(*end)
            if not self.running or (self._done is not None and time.monotonic() - self._done > _LAST_S):
                # The job has finished when the group that exports the model has, whoever else has failed.
                return min(last, key=lambda end: _RANKING.index(end[1].status))
            if self.job.ask_to_stop() and not self._ending:
                self._stop()
            if self._ending:
                self._renew()  # what they have must not be given away while they save and export
            else:
                self._follow_grant()
            self._take_down()

    def _look_at(self, spec: GroupSpec, outcome: GroupOutcome) -> None:
        """Take in how a group ended."""
        if outcome.status in ("finished", "stopped"):
            self._done = self._done or time.monotonic()
        if outcome.status in ("finished", "stopped", "followed") and not self._ending:
            self._ending = True
            self._end_newcomers(self.running)
        if outcome.status == "failed" and self.running and not self._ending:
            gang = _gang(spec, self.units)
            took_part = spec.name in self._took_part
            self._in_vain[gang] = 0 if took_part else self._in_vain.get(gang, 0) + 1
            wait = self.job.judge(spec, outcome, self._in_vain[gang])
            self._not_before[gang] = time.monotonic() + wait

    def _stop(self) -> None:
        """Let groups save and end, and those that have nothing to save end at once."""
        self._ending = True
        if self.job.has_started(self._attempt):
            self._end_newcomers(self.running)
            return
        for each in self.running.values():
            each.group.take_down()

    def _follow_grant(self) -> None:
        """Renew the lease, and let groups leave or start as the grant says."""
        grant = self._renew()
        if grant is None:
            return
        if not grant.nodes and not self._took_part.isdisjoint(self.running):
            return  # nobody takes all that a job has: whoever keeps the leases is about to know better
        staying = {name: each.gang for name, each in self.running.items() if each.departure is None}
        leaving, more = compare(gangs_of(grant.nodes, self.units), staying)
        for name in leaving:
            leave_by = time.monotonic() + self.grace_s
            self.running[name].departure = Departure(leave_by, partial(self.job.is_saving, name))
            self.lighthouse.leave(name)
            self.job.event("leaving", group=name, for_whom=list(grant.gave_way_to))
        self._end_newcomers(leaving)
        for gang in more:
            if time.monotonic() >= self._not_before.get(gang, 0.0):
                self._start(self._spec(gang))

    def _renew(self) -> Grant | None:
        held = [node for each in self.running.values() for node in each.gang]
        view = self._look()
        stepping = () if view is None else view.groups
        starting = [
            node
            for name, each in self.running.items()
            if name not in stepping and each.departure is None  # who leaves steps no more, but did
            for node in each.gang
        ]
        return self.lease.renew(held, starting)

    def _take_down(self) -> None:
        """End groups that do not leave in time, and those whose nodes are gone."""
        alive = alive_nodes()
        self._standing_by.only(alive)
        for name, each in self.running.items():
            departure = None if each.taken_down else each.departure
            if departure is not None and departure.is_late(time.monotonic()):
                self.job.event("reclaimed", group=name, after_s=self.grace_s)
                each.group.take_down()
                each.taken_down = True
            elif not alive >= set(each.gang):
                # Ray Train would find out too, but later; nothing of this group is left to save.
                each.group.take_down()

    def _end_newcomers(self, names: Iterable[str]) -> None:
        """End those of these groups at once that do not take part: they have nothing to save."""
        view = self._look()
        for name in names:
            # A lighthouse that died knows of no view until it is reminded.
            if name not in (self._took_part if view is None else view.groups):
                self.running[name].group.take_down()

    def _look(self) -> View | None:
        """The groups that step together now."""
        view = self.lighthouse.view()
        if view is not None:
            self._took_part.update(view.groups)
        return view

    def _spec(self, gang: Gang) -> GroupSpec:
        spec = self.job.group_at(self._started, gang)
        self._started += 1
        return spec

    def _start(self, spec: GroupSpec) -> None:
        group = self._standing_by.take(spec.nodes) or Group(self.agents)
        group.start(spec, self.own)
        self.running[spec.name] = _Running(group, _gang(spec, self.units))

    def _end(self, ended: Group) -> GroupOutcome:
        name = ended.spec.name
        outcome = ended.outcome()
        each = self.running.pop(name)
        if outcome.status == "failed" and each.departure is not None:
            outcome = GroupOutcome("left", outcome.failures)  # it had to go, and is gone
        try:
            self.lighthouse.ended(name)
        except Exception as error:  # noqa: BLE001  (its silence says the same, later)
            print(f"the lighthouse does not hear that group {name} has ended: {error}", flush=True)
        if self._ending or not ended.rest():
            ended.kill()
        else:
            self._standing_by.add(ended)
        if each.departure is not None:
            there = {node for other in self.running.values() for node in other.gang}
            self.agents.only(there | self._standing_by.nodes)
        return outcome


def _gang(spec: GroupSpec, units: int) -> Gang:
    tensor = len(spec.nodes) // units
    return tuple(sorted(spec.nodes[::tensor]))
