"""Every fault once, for real: what must hold afterwards does, and the job says what happened to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.lab.faults.laboratory import EVERY_STEPS, HANG_TIMEOUT_S, VICTIM, Laboratory
from infra.lab.faults.scenario import FaultOutcome, Trial
from infra.lab.faults.scenarios import SCENARIOS
from infra.lab.faults.trials import chosen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAILURES = {
    "rank-killed": ("worker", VICTIM),
    "group-killed": ("worker", 0),
    "train-worker-killed": ("worker", VICTIM),
    "rank-stopped": ("hang", VICTIM),
    "rank-waits": ("hang", VICTIM),
    "collective-hangs": ("hang", None),
    "out-of-memory": ("memory", VICTIM),
    "killed-for-memory": ("memory", VICTIM),
    "node-lost": ("node", VICTIM),
    "group-node-lost": ("node", 0),
    "node-power-cut": ("node", VICTIM),
    "group-power-cut": ("node", 0),
    "node-cut": ("node", VICTIM),
    "node-cut-out": ("node", VICTIM),
    "node-cut-in": ("node", VICTIM),
    "group-cut": ("node", 0),
    "group-cut-out": ("node", 0),
    "group-cut-in": ("node", 0),
    "fork-server-killed": ("worker", VICTIM),
    "checkpoint-truncated": ("worker", VICTIM),
    "checkpoint-flipped": ("worker", VICTIM),
    "checkpoint-deleted": ("worker", VICTIM),
    "checkpoint-unreadable": ("worker", VICTIM),
}
"""Class and rank that the job has to find, where it is a rank or its node that is struck. Where all ranks
stand in collectives, any of them may be named."""
GO_ON = ("control-killed", "broker-killed", "disk-full", "disk-full-in-checkpoint", "storage-read-only")
GO_ON += ("lighthouse-killed", "store-killed", "storage-away", "clock-jumps", "cut-briefly", "packets-lost")
GO_ON += ("loss-nan-skipped", "straggler", "storage-hangs")
"""Nothing is done again."""
ENDS = dict.fromkeys(("loss-nan", "all-checkpoints-bad"), "it has ended, with a sentence")
ENDS |= dict.fromkeys(("slow-export", "slow-data"), "it has ended, at its first attempt")
WITH_PEERS = ("group-killed", "group-node-lost", "group-power-cut", "node-back")
WITH_PEERS += ("group-cut", "group-cut-out", "group-cut-in")


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    with Laboratory(print) as lab:
        yield lab


@pytest.mark.parametrize("name", [scenario.name for scenario in chosen(())])
def test_a_job_survives(name: str, lab: Laboratory) -> None:
    scenario = SCENARIOS[name]
    if (missing := scenario.missing()) is not None:
        pytest.skip(missing)
    outcome = scenario.run(lab, 1)
    # Each step stands once, or again from a checkpoint; losses are those of an undisturbed run (to the last
    # bit for jobs of one group); no lease and no process is left.
    assert outcome.wrong == []
    (trial,) = outcome.trials
    assert trial.lost == 0
    assert_it_was_found(name, trial)
    assert_it_went_on(name, trial, outcome)


def assert_it_was_found(name: str, trial: Trial) -> None:
    if name not in FAILURES:
        return
    failure_class, rank = FAILURES[name]
    assert trial.failure is not None
    assert trial.failure["failure_class"] == failure_class
    if rank is not None:
        assert (trial.failure["rank"], trial.failure["node"]) == (rank, trial.node)
    if failure_class == "hang":
        assert trial.found_s is not None
        assert trial.found_s <= HANG_TIMEOUT_S


def assert_it_went_on(name: str, trial: Trial, outcome: FaultOutcome) -> None:
    if name in GO_ON or name in WITH_PEERS:
        assert trial.repeated == 0
        return
    if name in ENDS:
        assert trial.state == ENDS[name]
        return
    assert trial.state == "checkpoint"
    passed_over = name in ("checkpoint-truncated", "checkpoint-flipped", "checkpoint-deleted")
    assert (EVERY_STEPS <= trial.repeated < 2 * EVERY_STEPS) is passed_over
    assert trial.repeated > 0 or name == "node-lost", "ranks step on until Ray ends them on a lost node"
