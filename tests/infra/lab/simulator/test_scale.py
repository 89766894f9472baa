"""Ten thousand devices are simulated within minutes on one core."""

from __future__ import annotations

import time

import pytest

from infra.lab.simulator.comparison import Setup, compare
from infra.lab.simulator.costs import Costs
from infra.lab.simulator.source import trace_of

DEVICES = 10_000
LIMIT_S = 600.0
"""CPU seconds of all policies together."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_days_of_ten_thousand_devices_are_simulated_in_time() -> None:
    setup = Setup(((None, DEVICES),), apps=8, tensor=4, costs=Costs(decide_every_s=60))
    trace = trace_of("philly:1", setup.recipe(days=2, load=1.0, elastic=0.5))
    assert len(trace.jobs) > 5000
    started = time.process_time()
    rows = compare(trace, setup)
    assert time.process_time() - started < LIMIT_S
    assert [row.unfinished for row in rows] == [0, 0, 0]
