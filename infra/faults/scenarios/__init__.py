"""The scenarios by name, in the order in which they are run; a file of them is a subject."""

from __future__ import annotations

from infra.faults.scenario import Scenario
from infra.faults.scenarios import checkpoints, clock, head, nodes, steering, storage, workers

_SUBJECTS = (workers, nodes, steering, checkpoints, head, storage, clock)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for subject in (workers, nodes, steering, checkpoints, head, storage, clock)
    for scenario in subject.SCENARIOS
}
