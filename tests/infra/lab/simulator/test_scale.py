"""Ten thousand devices are simulated within minutes on one core."""

from __future__ import annotations

import pytest

from infra.lab.simulator.comparison import Setup, compare
from infra.lab.simulator.costs import Costs
from infra.lab.simulator.outcome import Figures
from infra.lab.simulator.source import trace_of
from tests.pace import loops

DEVICES = 10_000
LIMIT = 23_000
"""Loops (`tests.pace`) of all policies together: some ten minutes of one core."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_days_of_ten_thousand_devices_are_simulated_in_time() -> None:
    setup = Setup(((None, DEVICES),), apps=8, tensor=4, costs=Costs(decide_every_s=60))
    trace = trace_of("philly:1", setup.recipe(days=2, load=1.0, elastic=0.5))
    assert len(trace.jobs) > 5000
    rows: list[Figures] = []
    assert loops(lambda: rows.extend(compare(trace, setup)), tries=1) < LIMIT
    assert [row.unfinished for row in rows] == [0, 0, 0]
