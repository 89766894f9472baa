"""Small worlds whose outcome can be computed by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from infra.lab.simulator.costs import Costs
from infra.lab.simulator.daily_load import Curve, SimulatedApp
from infra.lab.simulator.jobs import Job, Trace, in_order
from infra.lab.simulator.occupancy import cluster_of
from infra.lab.simulator.policies import policy_of
from infra.lab.simulator.simulation import Rules, Simulation, SimulationOutcome
from infra.lab.simulator.training import JobRun

NOTHING = Costs(
    start_s=0,
    join_pause_s=0,
    leave_s=0,
    kill_s=0,
    kill_pause_s=0,
    restart_s=0,
    replica_start_s=0,
    replica_drain_s=0,
    doubling=1.0,
    decide_every_s=0,
)
"""Changing hands costs nothing, and n groups are n times as fast as one."""


@dataclass(frozen=True)
class Given:
    """A load that is given step by step; the last rate stays."""

    rates: Sequence[float]
    step_s: float = 100.0

    def steps(self, seed: int) -> Iterator[tuple[float, float]]:
        number = 0
        while True:
            yield number * self.step_s, self.rates[min(number, len(self.rates) - 1)]
            number += 1


def app(rates: Sequence[float], **fields: Any) -> SimulatedApp:
    """An app under a given load; a replica is meant to have 2 requests a second, and can answer 2.5."""
    return SimulatedApp("app", cast(Curve, Given(rates)), **fields)


def simulate(
    jobs: Sequence[Job],
    policy: str,
    devices: int,
    *,
    node_devices: int = 8,
    apps: Sequence[SimulatedApp] = (),
    serving: int = 0,
    reserve: int = 0,
    costs: Costs = NOTHING,
    rules: Rules | None = None,
    seed: int = 0,
) -> SimulationOutcome:
    """What comes of these jobs in a small cluster."""
    nodes = cluster_of([(None, devices)], node_devices)
    chosen = policy_of(policy, nodes, serving, reserve)
    return Simulation(Trace(in_order(jobs), "test"), apps, nodes, chosen, costs, rules, seed).run()


def by_name(outcome: SimulationOutcome) -> dict[str, JobRun]:
    return {run.job.name: run for run in outcome.runs}
