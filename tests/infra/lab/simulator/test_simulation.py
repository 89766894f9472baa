"""The simulation against outcomes computed by hand, and against queueing theory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from cluster.errors import RequestError
from infra.lab.simulator.jobs import Job
from infra.lab.simulator.policies import Shoal
from infra.lab.simulator.simulation import Rules, SimulationOutcome
from infra.lab.simulator.training import JobRun
from tests.infra.lab.simulator.worlds import NOTHING, app, by_name, simulate


def times(outcome: SimulationOutcome) -> dict[str, tuple[float | None, float | None]]:
    """When each job got its first devices, and when it was done."""
    return {run.job.name: (run.granted_at, run.finished_at) for run in outcome.runs}


QUEUE = [
    Job("a", 0, 10, group=2),
    Job("b", 1, 5, group=1),
    Job("c", 2, 4, group=2),
    Job("d", 3, 3, group=1),
]


@pytest.mark.parametrize("policy", ["fixed", "serving-first", "shoal"])
def test_jobs_of_a_fixed_size_start_in_order_and_small_ones_fill_the_gaps(policy: str) -> None:
    outcome = simulate(QUEUE, policy, devices=2)
    assert times(outcome) == {"a": (0, 10), "b": (10, 15), "d": (10, 13), "c": (15, 19)}


def test_a_start_up_is_paid_by_every_job_once() -> None:
    outcome = simulate(QUEUE, "fixed", devices=2, costs=replace(NOTHING, start_s=2))
    assert times(outcome) == {"a": (0, 12), "b": (12, 19), "d": (12, 17), "c": (19, 25)}
    assert outcome.spent.starting == 2 * (2 + 1 + 1 + 2)


def test_the_first_in_the_queue_is_not_passed_for_ever() -> None:
    small = [Job(f"s{number}", number * 5.0, 10, group=1) for number in range(40)]
    large = Job("large", 1, 10, group=2)
    passed = times(simulate([*small, large], "fixed", devices=2, rules=Rules(overdue_s=1e9)))
    kept = times(simulate([*small, large], "fixed", devices=2, rules=Rules(overdue_s=30)))
    assert passed["large"][0] > 190  # type: ignore[operator] # after the last of the small ones
    assert kept["large"][0] <= 31 + 10  # type: ignore[operator] # what ran when it was overdue has ended


ELASTIC = Job("elastic", 0, 20, group=1, groups=2, min_groups=1, max_groups=4)


def test_an_elastic_job_takes_what_is_idle_and_gives_it_back() -> None:
    # 40 group-seconds: 4 groups for 5 s, then 2 beside the other for 10 s.
    outcome = simulate([ELASTIC, Job("other", 5, 10, group=2)], "shoal", devices=4)
    assert times(outcome) == {"elastic": (0, 15), "other": (5, 15)}
    assert by_name(outcome)["elastic"].resizes == 1
    assert outcome.spent.training == 4 * 15


def test_an_elastic_job_that_just_changed_takes_no_more_until_it_has_settled() -> None:
    jobs = [Job("other", 0, 7, group=2), ELASTIC]
    assert by_name(simulate(jobs, "shoal", 4, rules=Rules(settle_s=20)))["elastic"].finished_at == 20
    # 14 of 40 are done when the other ends, the rest by 4 groups.
    assert by_name(simulate(jobs, "shoal", 4, rules=Rules(settle_s=0)))["elastic"].finished_at == 13.5


def test_the_greater_priority_is_looked_at_first_however_few_are() -> None:
    jobs = [Job("now", 0, 10, group=1), Job("low", 1, 10, group=1), Job("high", 2, 10, group=1, priority=1)]
    outcome = simulate(jobs, "fixed", devices=1, rules=Rules(depth=1))
    assert times(outcome) == {"now": (0, 10), "high": (10, 20), "low": (20, 30)}


def test_without_elasticity_the_same_job_keeps_the_size_that_was_asked_for() -> None:
    outcome = simulate([ELASTIC, Job("other", 5, 10, group=2)], "fixed", devices=4)
    assert times(outcome) == {"elastic": (0, 20), "other": (5, 15)}


def test_twice_as_many_groups_bring_what_the_costs_say() -> None:
    costs = replace(NOTHING, doubling=0.9)
    outcome = simulate([ELASTIC], "shoal", devices=4, costs=costs)
    assert outcome.end_s == pytest.approx(20 / (2 * 0.9))  # 4 groups instead of 2


def test_those_that_stay_stand_only_for_the_moment_of_a_join() -> None:
    # 2 groups until the other job ends at 10; 2 more start for 3 s and are in at 13, when all stand for 1 s.
    costs = replace(NOTHING, start_s=3, join_pause_s=1)
    job = replace(ELASTIC, submit_s=1)
    rules = Rules(settle_s=0)
    outcome = simulate([Job("other", 0, 7, group=2), job], "shoal", devices=4, costs=costs, rules=rules)
    # From 4 (started) to 13: 9 s of 2 groups; 22 of 40 are left: 5.5 s of 4 groups from 14 on.
    assert times(outcome) == {"other": (0, 10), "elastic": (1, 19.5)}
    assert outcome.spent.standing == 2 * 1 + 2 * 1


def test_a_group_that_gives_way_keeps_its_devices_until_it_has_left() -> None:
    costs = replace(NOTHING, leave_s=2)
    outcome = simulate([ELASTIC, Job("other", 5, 10, group=2)], "shoal", devices=4, costs=costs)
    assert times(outcome) == {"elastic": (0, 15), "other": (7, 17)}
    assert outcome.spent.leaving == 2 * 2


RISE_AND_FALL = app([1, 5, 1], fewest=1, most=2)
"""One replica until 100 s, two wanted from 101 s on, one again at 230 s (after the delay of 30 s)."""
LONG = Job("long", 0, 1000, group=1)


def test_serving_takes_a_whole_job_back_to_its_checkpoint() -> None:
    costs = replace(NOTHING, checkpoint_every_s=30, restart_s=12, kill_s=0.5, leave_s=7, replica_drain_s=10)
    outcome = simulate([LONG], "serving-first", devices=2, apps=[RISE_AND_FALL], costs=costs)
    run = by_name(outcome)["long"]
    # Saved at 90, stopped at 101; devices again at 240, at work at 252 with 910 to go.
    assert (run.preemptions, run.lost, run.finished_at) == (1, 11, 252 + 910)
    assert outcome.spent.lost == 11
    assert outcome.spent.training == 1000
    assert outcome.spent.leaving == 0.5 + 10  # the job, and the replica in the end


def test_every_checkpoint_counts_whenever_progress_is_looked_at() -> None:
    run = JobRun(LONG, replace(NOTHING, checkpoint_every_s=30), Shoal().template(LONG)[0], 1)
    run.join(run.start(("node",), 0), 0)
    for moment in (10, 65, 101):
        run.sync(moment)
    run.leave(run.gangs, 101)
    assert (run.done, run.lost) == (90, 11)


def test_serving_takes_from_an_elastic_job_without_any_loss() -> None:
    # 2 groups of 1 until 101, then 1 until 230, then 2 again: 1,000 = 202 + 129 + 2 x 334.5.
    job = replace(LONG, max_groups=2)
    outcome = simulate([job], "shoal", devices=3, apps=[RISE_AND_FALL])
    run = by_name(outcome)["long"]
    assert (run.preemptions, run.lost, run.resizes) == (0, 0, 2)
    assert run.finished_at == pytest.approx(230 + (1000 - 202 - 129) / 2)


def test_a_group_that_still_starts_up_goes_before_the_only_one_that_works() -> None:
    # The other job ends at 92; what starts in its place would take part at 104, and serving wants it at 101.
    costs = replace(NOTHING, start_s=12)
    jobs = [Job("early", 0, 80, group=1), replace(LONG, max_groups=2)]
    outcome = simulate(jobs, "shoal", devices=3, node_devices=1, apps=[RISE_AND_FALL], costs=costs)
    run = by_name(outcome)["long"]
    assert outcome.spent.starting == 12 + 12 + 9 + 12
    assert (run.preemptions, run.lost) == (0, 0)


def test_serving_cannot_have_what_a_job_needs_at_least() -> None:
    outcome = simulate([LONG], "shoal", devices=2, apps=[RISE_AND_FALL])
    assert by_name(outcome)["long"].finished_at == 1000
    (served,) = simulate([LONG, Job("late", 2000, 1, group=1)], "shoal", devices=2, apps=[RISE_AND_FALL]).apps
    # 5 requests a second for 100 s met one replica, which answers 2.5.
    assert (served.short_s, served.missed) == (100, 250)


def test_a_reserve_keeps_minimums_off_the_devices_that_serving_may_want() -> None:
    jobs = [Job(f"job-{number}", 0, 1000, group=1) for number in range(2)]
    outcome = simulate(jobs, "shoal", devices=3, apps=[RISE_AND_FALL], reserve=2)
    assert sorted(run.granted_at or 0 for run in outcome.runs) == [0, 1000]
    assert simulate(jobs, "shoal", devices=3, apps=[RISE_AND_FALL]).end_s == 1000
    pairs = [Job("first", 0, 10, group=2), Job("second", 0, 10, group=2)]
    assert simulate(pairs, "shoal", devices=4, reserve=1).end_s == 20  # of three, two and not four


def test_requests_are_missed_while_a_replica_starts() -> None:
    costs = replace(NOTHING, replica_start_s=20)
    job = Job("none", 400, 1, group=1)
    (served,) = simulate([job], "fixed", 3, node_devices=1, serving=2, apps=[RISE_AND_FALL], costs=costs).apps
    # None is ready for 20 s (1 a second comes), and from 100 s to 121 s one of the two that 5 need.
    assert served.missed == pytest.approx(20 * 1 + 21 * 2.5)
    assert served.requests == pytest.approx(100 * 1 + 100 * 5 + 200 * 1)
    assert served.short_s == pytest.approx(20 + 21)


def test_in_a_fixed_split_neither_takes_what_the_other_leaves() -> None:
    jobs = [Job("a", 0, 50, group=1), Job("b", 0, 50, group=1)]
    outcome = simulate(jobs, "fixed", devices=3, node_devices=1, serving=2, apps=[RISE_AND_FALL])
    assert times(outcome) == {"a": (0, 50), "b": (50, 100)}


def test_a_failure_costs_a_job_of_several_groups_one_of_them_and_a_moment() -> None:
    rules = Rules(node_mtbf_s=800, repair_s=10)
    job = replace(ELASTIC, duration_s=2000)
    outcome = simulate([job], "shoal", 4, node_devices=1, costs=replace(NOTHING, kill_pause_s=5), rules=rules)
    run = by_name(outcome)["elastic"]
    assert 0 < run.failures <= outcome.node_failures  # one may hit a node on which nothing runs
    assert (run.lost, run.preemptions) == (0, 0)
    assert outcome.spent.standing > 0
    assert outcome.spent.down > 0


def test_a_failure_takes_a_job_of_one_group_back_to_its_checkpoint() -> None:
    rules = Rules(node_mtbf_s=300, repair_s=60)
    costs = replace(NOTHING, checkpoint_every_s=100)
    outcome = simulate([LONG], "fixed", 1, costs=costs, rules=rules)
    (run,) = outcome.runs
    assert run.failures == outcome.node_failures > 0
    assert 0 < run.lost < 100 * run.failures
    assert outcome.end_s == pytest.approx(1000 + run.lost + outcome.spent.down)


@pytest.mark.parametrize(("kind", "mean_wait_s"), [("M/M/1", 1.0), ("M/D/1", 0.5)])
def test_one_server_makes_poisson_arrivals_wait_as_long_as_theory_says(kind: str, mean_wait_s: float) -> None:
    """Half a load: the mean wait is rho / (mu - lambda), and half of it where all take equally long
    (Pollaczek-Khinchine)."""
    chance = np.random.default_rng(7)
    count = 3000
    arrivals = itertools.accumulate(chance.exponential(2.0, count))
    lasts = chance.exponential(1.0, count) if kind == "M/M/1" else np.ones(count)
    jobs = [
        Job(f"j{number}", float(arrival), float(last), group=1)
        for number, (arrival, last) in enumerate(zip(arrivals, lasts, strict=True))
    ]
    outcome = simulate(jobs, "fixed", devices=1)
    waits = [run.granted_at - run.job.submit_s for run in outcome.runs if run.granted_at is not None]
    assert np.mean(waits) == pytest.approx(mean_wait_s, rel=0.15)


def test_a_job_that_can_never_run_is_refused_before_anything_is_simulated() -> None:
    with pytest.raises(RequestError, match=r"test: huge can never run under the policy fixed: it takes 9"):
        simulate([Job("huge", 0, 1, group=9)], "fixed", devices=8)
    with pytest.raises(RequestError, match=r"it takes 4 devices, by 4 on one node"):
        simulate([Job("wide", 0, 1, group=4, tensor=4)], "shoal", devices=8, node_devices=2)
    with pytest.raises(RequestError, match=r"no room for the 2 replicas that app always has"):
        simulate(QUEUE, "fixed", devices=8, node_devices=1, serving=1, apps=[app([1], fewest=2, most=2)])


@pytest.mark.parametrize("tenths", range(120, 140))
def test_time_goes_on_however_a_moment_is_rounded(tenths: int) -> None:
    at = tenths / 10  # (12.3 + 20) - 12.3 is less than 20
    elastic, other = Job("elastic", at, 900, 1, 2, 1, 4), Job("other", at + 5, 9, 1)
    outcome = simulate([elastic, other], "shoal", devices=12, rules=Rules(settle_s=20))
    assert outcome.decisions == 5
    assert [run.finished_at for run in outcome.runs] == pytest.approx([at + 450, at + 14])


def test_the_same_seed_gives_the_same_outcome() -> None:
    rules = Rules(node_mtbf_s=300, repair_s=60)
    first, second, other = (times(simulate([LONG], "shoal", 2, rules=rules, seed=seed)) for seed in (1, 1, 2))
    assert first == second != other
