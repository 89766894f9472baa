"""A job whose workers are all one group, built anew when its grant is another one."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle

from cluster.files.storage import Storage
from cluster.sharing.demand import Grant
from cluster.state.nodes import alive_nodes
from train_jobs.driver.departure import Departure
from train_jobs.driver.job_lease import RENEW_S, JobLease
from train_jobs.errors import RankError
from train_jobs.group.group import Group, first_ended
from train_jobs.group.job_agents import JobAgents
from train_jobs.group.outcome import GroupOutcome, rank_failure
from train_jobs.group.reports import Reports
from train_jobs.group.standing_by import StandingBy
from train_jobs.spec import GroupSpec

_CAUSE_S = 1.0
_REPORTS_S = 2.0
_END_TIMEOUT_S = 10.0


class SingleGroupJob(Protocol):
    """What is needed of the driver."""

    control: ActorHandle

    def spec_for(self, grant: Grant, attempt: int) -> GroupSpec:
        """All workers that a grant pays for, as one group."""

    def event(self, kind: str, **facts: Any) -> None: ...

    def has_started(self, attempt: int) -> bool:
        """Whether all ranks of an attempt have met, and have their state."""

    def is_saving(self, group: str) -> bool:
        """Whether ranks of a group write to the storage now."""

    def ask_to_stop(self) -> bool:
        """Whether the job is to stop; if so, its ranks are told."""


class SingleGroup:
    """The one group of a job, over all of its attempts.

    When the grant is another one, the group saves at a step boundary and ends. Meanwhile the next one starts
    as far as it can without devices, which are its own as soon as the group before is gone. Until that is
    gone the next one does not step, even where it has its devices already. A group that has not started yet
    and loses a device is ended at once: nothing is lost, and what it waits for may be somebody else's now. So
    is one that is to stop before it has started.

    When ranks fail and the grant stays what it was, those of the next attempt start in the workers that are
    there: nothing of Ray Train starts again.

    Args:
        own: where Ray Train keeps what is its own.
        grace_s: how long a group that has to make way may take.
    """

    def __init__(
        self, job: SingleGroupJob, lease: JobLease, own: Storage, agents: JobAgents, *, grace_s: float
    ) -> None:
        self.job = job
        self.lease = lease
        self.own = own
        self.agents = agents
        self.grace_s = grace_s
        self.group = Group(agents)
        self._next: Group | None = None
        self._failed: GroupSpec | None = None
        """The attempt whose workers wait for what comes next."""

    def run(
        self, grant: Grant, attempt: int, standing_by: StandingBy | None = None
    ) -> tuple[GroupSpec, GroupOutcome]:
        """Run what a grant pays for, to its end or until the grant is another one ("left").

        Args:
            standing_by: workers that may wait for it.
        """
        spec = self.job.spec_for(grant, attempt)
        if standing_by is not None:
            if (group := standing_by.take(spec.nodes)) is not None:
                self.group.kill()
                self.group = group
            standing_by.only(())
        self._start(spec)
        self.job.control.begin.remote(spec.attempt, spec.nodes)
        reports = self.agents.reports(spec)
        units, started = spec.nodes[:: self.lease.unit_size], False
        departure: Departure | None = None
        while not self._is_over(reports):
            self.job.control.begin.remote(spec.attempt, spec.nodes)  # again: it may have died meanwhile
            started = started or self.job.has_started(spec.attempt)
            grant_now = self.lease.renew(units, () if started else units)
            if not started and grant_now is not None and Counter(units) - Counter(grant_now.nodes):
                self.group.kill()
                outcome = GroupOutcome("left")
                break
            stops = self.job.ask_to_stop()
            if stops and not started:
                self.group.kill()
                outcome = GroupOutcome("stopped")
                break
            goes_on = not stops and departure is None
            if goes_on and started and self._prepare(spec, grant_now):
                somebody_waits = grant_now is not None and grant_now.gave_way_to
                leave_by = time.monotonic() + self.grace_s if somebody_waits else math.inf
                departure = Departure(leave_by, partial(self.job.is_saving, spec.name))
                self.job.control.stop.remote()
            late = departure is not None and departure.is_late(time.monotonic())
            if late or not alive_nodes() >= set(spec.nodes):
                # Of a node that is gone Ray Train would hear too, but later; nothing is left to save there.
                self.group.kill()
                outcome = GroupOutcome("left" if late else "failed")
                break
        else:
            outcome = self._failure(spec, reports) or self._end(spec)
        if not self.job.ask_to_stop():
            self.job.control.go_on.remote()  # whoever was asked to stop has done so
            if outcome.status == "stopped":
                self.job.event("ended", workers=spec.world_size)
                outcome = GroupOutcome("left")
        return spec, outcome

    def give_up(self) -> None:
        """End the workers of a failed attempt: there is no grant for another one now."""
        failed, self._failed = self._failed, None
        if failed is None:
            return
        self.agents.decide(failed, None)
        if first_ended([self.group], _END_TIMEOUT_S) is None:
            self.group.kill()

    def kill(self) -> None:
        self._failed = None
        self.group.kill()
        self._drop_next()

    def _is_over(self, reports: Reports) -> bool:
        """Whether the group has ended, or ranks of it have failed; waits a little for that."""
        ray.wait([self.group.ended, *reports.calls, *self.lease.news], timeout=RENEW_S)
        reports.take()
        return bool(reports.errors) or first_ended([self.group], 0) is not None

    def _failure(self, spec: GroupSpec, reports: Reports) -> GroupOutcome | None:
        """How ranks have failed whose workers all wait for what comes next; None where the group ends."""
        if not reports.errors:
            return None
        # Where a rank is lost the others fail too, a moment before or after.
        ended = self.group.ended

        def have_all(errors: Sequence[RankError]) -> bool:
            return len(errors) == spec.world_size

        def have_cause(errors: Sequence[RankError]) -> bool:
            return have_all(errors) or any(not each.collective for each in errors)

        reports.wait(have_cause, _CAUSE_S, ended)
        causes = reports.errors
        self.agents.end(spec.name, spec.nodes, timeout_s=0)
        all_wait = reports.wait(have_all, _REPORTS_S, ended)
        outcome = GroupOutcome("failed", [rank_failure(each.rank, each) for each in causes])
        if not all_wait and not self.lease.alive_of(spec.nodes) >= set(spec.nodes):
            # Ray Train waits for a worker that cannot be reached until Ray has given its node up.
            self.group.kill()
            return outcome
        if not all_wait or not self.job.has_started(spec.attempt) or not alive_nodes() >= set(spec.nodes):
            self.agents.decide(spec, None)
            return None
        self._failed = spec
        return outcome

    def _end(self, spec: GroupSpec) -> GroupOutcome:
        """Wait for the end of a group that has ended, or fails."""
        while first_ended([self.group], RENEW_S) is None:
            self.lease.renew(spec.nodes[:: self.lease.unit_size])
            if not alive_nodes() >= set(spec.nodes):
                self.group.kill()
                return GroupOutcome("failed")
        return self.group.outcome()

    def _start(self, spec: GroupSpec) -> None:
        """Start a group, unless the next one is this one, or its workers are there."""
        failed = self._failed
        if failed is not None and failed.nodes == spec.nodes and first_ended([self.group], 0) is None:
            self._failed = None
            self._drop_next()
            self.group.go_on_as(spec)
            self.agents.decide(failed, spec)
            return
        self.give_up()
        if self._next is not None and self._next.spec == spec:
            self.group.kill()
            self.group, self._next = self._next, None
            return
        self._drop_next()
        self.group.start(spec, self.own)

    def _prepare(self, spec: GroupSpec, grant: Grant | None) -> bool:
        """Have the next group started, where the grant is for other workers; whether to make way for it."""
        if grant is None or grant.units < self.lease.least:
            return False  # whoever keeps the leases is about to know better
        following = self.job.spec_for(grant, spec.attempt + 1)
        if following.nodes == spec.nodes:
            self._drop_next()
            return False
        if self._next is None or self._next.spec != following:
            self._drop_next()
            self._next = Group(self.agents)
            self._next.start(following, self.own, wait_s=self.grace_s)
        # Who only grows has time to wait until nothing is left to import on its new nodes.
        if not grant.gave_way_to and not self.agents.ready(following.nodes):
            return False
        for_whom = list(grant.gave_way_to) or None
        self.job.event("rebuilding", workers=spec.world_size, to=following.world_size, for_whom=for_whom)
        return True

    def _drop_next(self) -> None:
        if self._next is not None:
            self._next.kill()
            self._next = None
