"""The simulation: events in the order of time, and a decision whenever something changed."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cluster.errors import RequestError
from cluster.sharing.demand import Node
from infra.lab.simulator.costs import Costs
from infra.lab.simulator.daily_load import SimulatedApp
from infra.lab.simulator.jobs import Job, Trace
from infra.lab.simulator.occupancy import Occupancy
from infra.lab.simulator.policies import Moment, SharingPolicy
from infra.lab.simulator.serving import AppRun, SimulatedReplica
from infra.lab.simulator.training import JobRun, SimulatedGang, Spent, State


@dataclass(frozen=True)
class Rules:
    """How the broker decides, with the ledger's own values, and how far the simulation goes.

    Attributes:
        overdue_s: seconds after which nothing starts any more in the way of the job that is first in the
            queue (a reservation for the first alone, as in EASY backfilling).
        depth: jobs of the queue, from its head, that a decision looks at.
        settle_s: seconds after a change for which a job is left alone by its equals.
        node_mtbf_s: mean time between failures of one node; None: none fails.
        repair_s: until a node that failed is there again.
        patience_s: after the last submission; jobs that are not done by then are counted as unfinished.
    """

    overdue_s: float = 60.0
    depth: int = 100
    settle_s: float = 10.0
    node_mtbf_s: float | None = None
    repair_s: float = 1800.0
    patience_s: float = 30 * 86_400.0


@dataclass
class SimulationOutcome:
    """What came out.

    Attributes:
        window: device-seconds from the start to the last submission, when the cluster is under its load.
        spent: device-seconds from the start to the end.
        apps: as they were at the end of that window.
    """

    policy: str
    runs: list[JobRun]
    apps: list[AppRun]
    window: Spent
    window_s: float
    spent: Spent
    end_s: float
    devices: int
    decisions: int
    node_failures: int


class Simulation:
    """One trace and one load under one policy.

    Raises:
        RequestError: a job does not fit into the cluster, were it empty.
    """

    def __init__(
        self,
        trace: Trace,
        apps: Sequence[SimulatedApp],
        nodes: Sequence[Node],
        policy: SharingPolicy,
        costs: Costs,
        rules: Rules | None = None,
        seed: int = 0,
    ) -> None:
        self.trace, self.policy, self.costs, self.rules = trace, policy, costs, rules or Rules()
        self.occupancy = Occupancy(nodes)
        self.now = 0.0
        self.decisions = 0
        self.node_failures = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._apps = {app.name: AppRun(app) for app in apps}
        self._since = dict.fromkeys(self._apps, 0.0) | {job.name: job.submit_s for job in trace.jobs}
        self._active: dict[str, JobRun] = {}
        self._over: list[JobRun] = []
        self._to_come = len(trace.jobs)
        self._decides_at: float | None = None
        self._decided_at = -math.inf
        self._settles_at = -math.inf
        self._spent = Spent()
        self._window: tuple[Spent, list[AppRun], float] | None = None
        self._chance = np.random.default_rng([seed, 1])
        self._loads = [
            (run, run.app.curve.steps(seed * 1_000_003 + number))
            for number, run in enumerate(self._apps.values())
        ]
        if len(self._since) != len(self._apps) + len(trace.jobs):
            raise RequestError(f"{trace.source}: a job has the name of another, or of an app")
        self._check_that_all_fit()

    def run(self) -> SimulationOutcome:
        """From the first event until every job is done (or `Rules.patience_s` is over)."""
        for run, steps in self._loads:
            self._load_changes(run, steps)
        for job in self.trace.jobs:
            self._at(job.submit_s, self._arrives, job)
        # Those that arrive at the window's end are not in it: it ends before anything else then.
        self._decide()
        if self.rules.node_mtbf_s is not None:
            self._at(self._next_failure(), self._node_fails)
        last = self.trace.span_s + self.rules.patience_s
        while self._to_come or self._active:
            moment, _, happens, arguments = heapq.heappop(self._events)
            if moment > last:
                break
            if self._window is None and moment > self.trace.span_s:
                self._end_of_window()
            self._pass(moment)
            happens(*arguments)
        if self._window is None:
            self._end_of_window()
        return self._outcome()

    # -- time ---------------------------------------------------------------------------------------------

    def _at(self, moment: float, happens: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (moment, next(self._order), happens, arguments))

    def _pass(self, moment: float) -> None:
        passed = moment - self.now
        self._spent.idle += self.occupancy.free * passed
        self._spent.down += self.occupancy.down * passed
        self.now = moment

    def _changed(self) -> None:
        """Something changed: decide, but not before the last decision is old enough."""
        if self._decides_at is None:
            self._decides_at = max(self.now, self._decided_at + self.costs.decide_every_s)
            self._at(self._decides_at, self._decide)

    # -- decisions ----------------------------------------------------------------------------------------

    def _decide(self) -> None:
        self._decides_at, self._decided_at = None, self.now
        self.decisions += 1
        now, rules = self.now, self.rules
        running, waiting, settling = [], [], []
        for name, run in self._active.items():
            if run.gangs:
                running.append(run)
                # The sum that is waited for below: a difference may be rounded to less, for ever.
                if self.policy.elastic and run.job.elastic and now < run.changed_at + rules.settle_s:
                    settling.append(name)
            else:
                waiting.append(run)
        waiting.sort(key=lambda run: (-run.job.priority, run.job.submit_s))
        head = waiting[0].job if waiting else None
        asks = [*running, *waiting[: rules.depth]]
        grants = self.policy.decide(
            Moment(
                self.occupancy.alive(),
                [run.demand() for run in asks],
                [run.demand() for run in self._apps.values()],
                self._since,
                {run.template.holder: run.promised() for run in running}
                | {name: run.promised() for name, run in self._apps.items()},
                [head.name] if head is not None and now - head.submit_s >= rules.overdue_s else [],
                settling,
            )
        )
        for name, app in self._apps.items():
            if grants[name].nodes != app.demand().held:
                self._resize_app(app, grants[name].nodes)
        for run in asks:
            if grants[run.job.name].nodes != run.demand().held:
                self._resize_job(run, grants[run.job.name].nodes)
        if settling and self.occupancy.free and self._settles_at <= now:
            # What they may take then is free already, so nothing else would ask for a decision.
            self._settles_at = min(self._active[name].changed_at for name in settling) + rules.settle_s
            self._at(max(now, self._settles_at), self._changed)

    def _resize_job(self, run: JobRun, places: Sequence[str]) -> None:
        now, costs = self.now, self.costs
        run.sync(now)
        leaving, added = run.changes(places)
        if not leaving and not added:
            return
        ran = run.running > 0
        if leaving:
            run.leave(leaving, now)
            run.preemptions += run.waits and not added  # else it was to start here, and starts elsewhere
            goes_s = costs.kill_s if run.waits else costs.leave_s
            for gang in leaving:
                self._at(now + goes_s, self._gang_left, run, gang)
        run.resizes += ran and run.running > 0
        begins_s = costs.start_s if run.progressed == 0 or run.running else costs.restart_s
        for its in added:
            self.occupancy.take(its, run.job.tensor)
            self._at(now + begins_s, self._gang_joins, run, run.start(its, now))
        self._foresee(run)

    def _resize_app(self, app: AppRun, places: Sequence[str]) -> None:
        now = self.now
        app.sync(now)
        leaving, added = app.changes(places)
        app.drain(leaving)
        for replica in leaving:
            self._at(now + self.costs.replica_drain_s, self._replica_left, app, replica)
        for node in added:
            self.occupancy.take([node], app.app.tensor)
            self._at(now + self.costs.replica_start_s, self._replica_serves, app, app.start(node))

    def _foresee(self, run: JobRun) -> None:
        ends_at = run.ends_at(self.now)
        if ends_at < math.inf:
            self._at(ends_at, self._ends, run, run.version)

    # -- jobs ---------------------------------------------------------------------------------------------

    def _arrives(self, job: Job) -> None:
        self._to_come -= 1
        template, gang_groups = self.policy.template(job)
        run = JobRun(job, self.costs, template, gang_groups)
        run.sync(self.now)
        self._active[job.name] = run
        self._changed()

    def _gang_joins(self, run: JobRun, gang: SimulatedGang) -> None:
        if gang.state is State.STARTING and gang in run.gangs:
            run.sync(self.now)
            run.join(gang, self.now)
            self._foresee(run)

    def _gang_left(self, run: JobRun, gang: SimulatedGang) -> None:
        if gang in run.gangs:
            run.sync(self.now)
            run.drop(gang, self.now)
            self.occupancy.give(gang.places, run.job.tensor)
            self._foresee(run)
            self._changed()

    def _ends(self, run: JobRun, version: int) -> None:
        if run.version != version:
            return
        run.sync(self.now)
        run.finished_at = self.now
        for gang in run.gangs:
            self.occupancy.give(gang.places, run.job.tensor)
        run.gangs.clear()
        self._over.append(self._active.pop(run.job.name))
        self._changed()

    # -- apps ---------------------------------------------------------------------------------------------

    def _load_changes(self, run: AppRun, steps: Iterator[tuple[float, float]]) -> None:
        run.sync(self.now)
        _, run.rate = next(steps)
        self._look(run)
        for delay_s in (run.app.autoscale.upscale_delay_s, run.app.autoscale.downscale_delay_s):
            self._at(self.now + delay_s, self._look, run)
        self._at(self.now + run.app.curve.step_s, self._load_changes, run, steps)

    def _look(self, run: AppRun) -> None:
        run.sync(self.now)
        if run.look(self.now):
            self._changed()

    def _replica_serves(self, run: AppRun, replica: SimulatedReplica) -> None:
        if replica in run.replicas and not replica.drains:
            run.sync(self.now)
            run.serve(replica)

    def _replica_left(self, run: AppRun, replica: SimulatedReplica) -> None:
        if replica in run.replicas:
            run.sync(self.now)
            run.drop(replica)
            self.occupancy.give([replica.node], run.app.tensor)
            self._changed()

    # -- nodes --------------------------------------------------------------------------------------------

    def _next_failure(self) -> float:
        assert self.rules.node_mtbf_s is not None
        return self.now + float(self._chance.exponential(self.rules.node_mtbf_s / len(self.occupancy.nodes)))

    def _node_fails(self) -> None:
        self._at(self._next_failure(), self._node_fails)
        node = self.occupancy.nodes[int(self._chance.integers(len(self.occupancy.nodes)))].node_id
        if node in self.occupancy.dead:
            return
        self.node_failures += 1
        self.occupancy.die(node)
        for run in self._active.values():
            hit = [gang for gang in run.gangs if node in gang.places]
            if hit:
                run.sync(self.now)
                run.die(hit, self.now)
                for gang in hit:
                    self.occupancy.give(gang.places, run.job.tensor)
                self._foresee(run)
        for app in self._apps.values():
            app.sync(self.now)
            for replica in [each for each in app.replicas if each.node == node]:
                app.drop(replica)
                self.occupancy.give([node], app.app.tensor)
        self._at(self.now + self.rules.repair_s, self._node_returns, node)
        self._changed()

    def _node_returns(self, node: str) -> None:
        self.occupancy.come_back(node)
        self._changed()

    # -- the end ------------------------------------------------------------------------------------------

    def _sync_all(self) -> Spent:
        """What all holders spent until now, and what nobody had."""
        spent = replace(self._spent)
        for run in self._active.values():
            run.sync(self.now)
        for app in self._apps.values():
            app.sync(self.now)
            spent.add(app.spent)
        for run in (*self._over, *self._active.values()):
            spent.add(run.spent)
        return spent

    def _end_of_window(self) -> None:
        self._pass(max(self.now, self.trace.span_s))
        spent = self._sync_all()
        apps = [copy(run) for run in self._apps.values()]
        self._window = spent, apps, self.now

    def _outcome(self) -> SimulationOutcome:
        assert self._window is not None
        window, apps, window_s = self._window
        runs = sorted([*self._over, *self._active.values()], key=lambda run: (run.job.submit_s, run.job.name))
        return SimulationOutcome(
            self.policy.name,
            runs,
            apps,
            window,
            window_s,
            self._sync_all(),
            self.now,
            self.occupancy.total,
            self.decisions,
            self.node_failures,
        )

    def _check_that_all_fit(self) -> None:
        """Every kind of job fits beside the fewest replicas of the apps."""
        fewest = [replace(run.demand(), max=run.app.fewest) for run in self._apps.values()]
        nodes = self.occupancy.nodes
        empty = self.policy.decide(Moment(nodes, [], fewest, {}))
        for demand in fewest:
            if empty[demand.holder].units < demand.min:
                raise RequestError(
                    f"the policy {self.policy.name} has no room for the {demand.min} replicas that"
                    f" {demand.holder} always has; give serving more devices"
                )
        known: set[tuple[Any, ...]] = set()
        for job in self.trace.jobs:
            kind = (job.group, job.groups, job.min_groups, job.tensor, job.accelerator)
            if kind in known:
                continue
            known.add(kind)
            demand, _ = self.policy.template(job)
            if not self.policy.decide(Moment(nodes, [demand], fewest, {}))[job.name].nodes:
                kinds = f" of {job.accelerator}" if job.accelerator else ""
                devices = demand.min * job.tensor or job.devices
                raise RequestError(
                    f"{self.trace.source}: {job.name} can never run under the policy {self.policy.name}: it"
                    f" takes {devices} devices{kinds}, by {job.tensor} on one node"
                )
