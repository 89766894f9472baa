"""Ten thousand devices are simulated within minutes on one core."""

from __future__ import annotations

import time

import pytest

from infra.simulator.costs import Costs
from infra.simulator.generator import Recipe
from infra.simulator.load import apps_for
from infra.simulator.occupancy import cluster_of
from infra.simulator.policies import NAMES, policy_of
from infra.simulator.simulation import Simulation
from infra.simulator.source import trace_of

DEVICES = 10_000
LIMIT_S = 600.0
"""CPU seconds of one policy."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", NAMES)
def test_two_days_of_ten_thousand_devices_are_simulated_in_time(policy: str) -> None:
    recipe = Recipe(seed=1, days=2, load=1.2, devices=DEVICES // 2, cluster=DEVICES)
    trace = trace_of("philly", recipe)
    assert len(trace.jobs) > 5000
    nodes = cluster_of([(None, DEVICES)], 8)
    started = time.process_time()
    outcome = Simulation(
        trace,
        apps_for(DEVICES // 2, 8, 2),
        nodes,
        policy_of(policy, nodes, DEVICES // 2),
        Costs(decide_every_s=60),
    ).run()
    assert time.process_time() - started < LIMIT_S
    assert all(run.finished_at is not None for run in outcome.runs)
    assert outcome.spent.total() == pytest.approx(DEVICES * outcome.end_s)
