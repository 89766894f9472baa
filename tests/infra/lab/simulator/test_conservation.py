"""Nothing appears or vanishes: devices, device-seconds and work, on random small traces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.lab.simulator.costs import Costs
from infra.lab.simulator.jobs import Job
from infra.lab.simulator.simulation import Rules, SimulationOutcome
from tests.infra.lab.simulator.worlds import app, simulate

SECONDS = st.sampled_from([0.0, 1.0, 7.5, 30.0, 250.0])


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    found = []
    for number in range(draw(st.integers(1, 7))):
        tensor = draw(st.sampled_from([1, 1, 2]))
        group = tensor * draw(st.sampled_from([1, 1, 2]))
        groups = draw(st.integers(1, 2)) if group < 4 else 1
        least = draw(st.integers(1, groups))
        most = draw(st.integers(groups, 4))
        found.append(
            Job(
                f"job-{number}",
                draw(st.floats(0, 600)),
                draw(st.floats(0.5, 900)),
                group,
                groups,
                least,
                most,
                tensor,
                draw(st.integers(0, 1)),
            )
        )
    return found


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    names = ("start_s", "join_pause_s", "leave_s", "kill_s", "kill_pause_s", "restart_s")
    drawn = {name: draw(SECONDS) for name in (*names, "replica_start_s", "replica_drain_s")}
    return replace(
        Costs(),
        **drawn,
        decide_every_s=draw(st.sampled_from([0.0, 1.0, 10.0])),
        checkpoint_every_s=draw(st.sampled_from([20.0, 1000.0])),
        doubling=draw(st.sampled_from([0.8, 1.0])),
    )


def check(outcome: SimulationOutcome, devices: int) -> None:
    """The books balance; that no device has two owners is checked at every grant by the occupancy itself."""
    assert outcome.spent.total() == pytest.approx(devices * outcome.end_s, rel=1e-9, abs=1e-6)
    assert outcome.window.total() == pytest.approx(devices * outcome.window_s, rel=1e-9, abs=1e-6)
    assert all(value >= -1e-6 for value in vars(outcome.spent).values())
    for run in outcome.runs:
        if run.finished_at is None:
            continue
        assert run.progressed - run.lost == pytest.approx(run.work, rel=1e-9, abs=1e-6)
        assert run.done == pytest.approx(run.work, rel=1e-9, abs=1e-6)
        assert run.granted_at is not None
        assert run.job.submit_s <= run.granted_at <= run.finished_at
        fastest = run.costs.speed(run.job.max_groups)
        assert run.finished_at - run.granted_at >= run.work / fastest - 1e-6
        assert run.gangs == []
    for served in outcome.apps:
        assert 0 <= served.missed <= served.requests + 1e-9


@settings(max_examples=40, deadline=None)
@given(
    jobs(),
    costs(),
    st.sampled_from(["fixed", "serving-first", "shoal", "reserve"]),
    st.lists(st.sampled_from([0.0, 1.0, 4.0, 9.0]), min_size=1, max_size=8),
    st.booleans(),
)
def test_devices_time_and_work_are_conserved(
    submitted: list[Job], costing: Costs, policy: str, rates: list[float], fails: bool
) -> None:
    rules = Rules(
        overdue_s=100,
        settle_s=20,
        node_mtbf_s=900 if fails else None,
        repair_s=120,
        patience_s=20_000,
    )
    outcome = simulate(
        submitted,
        "shoal" if policy == "reserve" else policy,
        devices=12,
        node_devices=4,
        apps=[app([*rates, 0.0], fewest=1, most=4)],
        serving=4,
        reserve=4 if policy == "reserve" else 0,
        costs=costing,
        rules=rules,
        seed=3,
    )
    check(outcome, 12)
    if not fails:
        assert all(run.finished_at is not None for run in outcome.runs)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1, 50)), min_size=1, max_size=12))
def test_equal_jobs_of_one_device_start_in_the_order_of_their_submission(
    drawn: list[tuple[float, float]],
) -> None:
    submitted = [Job(f"job-{number:02}", at, lasts, group=1) for number, (at, lasts) in enumerate(drawn)]
    for policy in ("fixed", "serving-first", "shoal"):
        outcome = simulate(submitted, policy, devices=2)
        starts = [run.granted_at for run in outcome.runs]
        assert starts == sorted(starts, key=lambda start: start or 0.0)
        # Work conservation of two servers, by an oracle of three lines.
        free, expected = [0.0, 0.0], []
        for run in outcome.runs:
            free.sort()
            expected.append(max(free[0], run.job.submit_s))
            free[0] = expected[-1] + run.job.duration_s
        assert starts == pytest.approx(expected)
