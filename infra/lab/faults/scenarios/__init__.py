"""The scenarios by name, in the order in which they are run; a file of them is a subject."""

from __future__ import annotations

from infra.lab.faults.scenario import Scenario
from infra.lab.faults.scenarios import (
    bad_steps,
    checkpoints,
    clock,
    head,
    network,
    nodes,
    power,
    slow_work,
    steering,
    storage,
    workers,
)

_SUBJECTS = (
    workers,
    nodes,
    power,
    network,
    steering,
    bad_steps,
    checkpoints,
    head,
    storage,
    slow_work,
    clock,
)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario for subject in _SUBJECTS for scenario in subject.SCENARIOS
}
