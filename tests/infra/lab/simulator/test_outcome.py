"""The figures are those of the jobs, and a policy is compared with the first one."""

from __future__ import annotations

import pytest

from infra.lab.simulator.jobs import Job
from infra.lab.simulator.outcome import Times, figures, ratios, seconds, table
from infra.lab.simulator.simulation import Rules
from tests.infra.lab.simulator.worlds import simulate

JOBS = [Job("a", 0, 60, group=1, min_groups=1, max_groups=2), Job("b", 10, 40, group=1)]


def test_times_are_mean_median_and_the_time_of_95_of_100() -> None:
    times = Times.of([float(number) for number in range(1, 102)] + [1000.0])
    assert (times.mean_s, times.median_s) == pytest.approx((sum([*range(1, 102), 1000]) / 102, 51.5))
    assert 95 < (times.p95_s or 0) < 98
    assert Times.of([]) == Times(None, None, None)


def test_figures_are_those_of_the_jobs_and_of_the_time_in_which_they_were_submitted() -> None:
    # One device: a from 0 to 60, b from 60 to 100; b was submitted last, at 10.
    row = figures(simulate(JOBS, "fixed", devices=1))
    assert (row.queuing.mean_s, row.completion.mean_s) == ((0 + 50) / 2, (60 + 90) / 2)
    assert row.use["training"] == row.allocated == pytest.approx(1)
    # Two devices: a has both until 10, one until 50, and both again for what is left: nothing.
    two = figures(simulate(JOBS, "shoal", devices=2))
    assert (two.queuing.mean_s, two.completion.mean_s) == pytest.approx((0, (50 + 40) / 2))
    assert two.resizes == 1


def test_devices_of_dead_nodes_are_nobodys() -> None:
    jobs = [Job("a", 0, 500, group=1), Job("b", 2000, 500, group=1)]
    row = figures(simulate(jobs, "fixed", devices=1, rules=Rules(node_mtbf_s=300, repair_s=60), seed=2))
    assert row.use["down"] > 0
    had = sum(part for name, part in row.use.items() if name not in ("idle", "down"))
    assert row.allocated == pytest.approx(had)


def test_policies_are_compared_with_the_first() -> None:
    fixed, shoal = (figures(simulate(JOBS, policy, devices=2)) for policy in ("fixed", "shoal"))
    told = ratios([fixed, shoal])
    assert told["fixed"]["completion_mean"] == 1
    assert told["shoal"]["completion_mean"] == pytest.approx(50 / 45)
    assert told["shoal"]["queuing_mean"] is None  # nobody waited
    lines = {name.strip(): texts for name, *texts in table([fixed, shoal])}
    assert lines["completion, mean"] == ["50 s", "45 s"]


def test_what_is_not_done_when_the_simulation_gives_up_is_told_and_in_no_time() -> None:
    row = figures(simulate(JOBS, "fixed", devices=1, rules=Rules(patience_s=60)))
    assert (row.unfinished, row.completion.mean_s) == (1, 60)


def test_a_job_that_was_never_started_waits_in_no_time_of_queuing() -> None:
    row = figures(simulate(JOBS, "fixed", devices=1, rules=Rules(patience_s=20)))
    assert (row.unfinished, row.queuing.mean_s, row.completion.mean_s) == (2, 0, None)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.25, "0.25 s"), (47, "47 s"), (720, "12 min"), (12_240, "3.4 h")]
)
def test_seconds_are_shown_as_people_say_them(value: float | None, text: str) -> None:
    assert seconds(value) == text
