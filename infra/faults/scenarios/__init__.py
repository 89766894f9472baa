"""The scenarios by name, in the order in which they are run; a file of them is a subject."""

from __future__ import annotations

from infra.faults.scenario import Scenario
from infra.faults.scenarios import nodes, steering, workers

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario for subject in (workers, nodes, steering) for scenario in subject.SCENARIOS
}
