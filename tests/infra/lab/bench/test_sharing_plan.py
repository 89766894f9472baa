"""What is measured: configs that Shoal takes, and a load that fits what the fixed split keeps."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.config.loader import load_config
from infra.lab.bench.sharing_plan import LOADS, MICRO, ONGOING, STEPS, TRAIN_STEP_S, SharingPlan

PLANS = [SharingPlan(), SharingPlan(paced=True), SharingPlan(paced=True, devices=8)]


@pytest.mark.parametrize("plan", PLANS, ids=["as it is", "paced", "8 devices"])
def test_the_config_is_one_of_shoals_and_has_as_many_devices(plan: SharingPlan, tmp_path: Path) -> None:
    file = tmp_path / "shoal.yaml"
    config = plan.config()
    config["cluster"] |= {"name": "bench", "storage": "./storage"}
    file.write_text(json.dumps(config))
    resolved = load_config(file).resolved
    assert sum(node.cpus * node.count for node in resolved.cluster.nodes) == plan.devices
    elastic, fixed = resolved.train_jobs["elastic"].workers, resolved.train_jobs["fixed"].workers
    shared, split = resolved.serve_apps["shared"].replicas, resolved.serve_apps["split"].replicas
    assert elastic.max + shared.min == fixed.max + split.max == plan.devices
    assert fixed.min == fixed.max == plan.fewest_workers
    assert split.min == split.max == shared.max == plan.most_replicas


@pytest.mark.parametrize("devices", [4, 6, 8, 12])
def test_more_workers_do_more_in_a_second_and_nobody_waits_long(devices: int) -> None:
    plan = SharingPlan(paced=True, devices=devices)
    job = plan.config()["train_jobs"]["elastic"]
    micro_batches = job["batch"]["global"] // MICRO
    micro_s = job["settings"]["sample_s"] * MICRO
    workers = range(plan.fewest_workers, plan.most_workers + 1)
    seconds = {each: -(-micro_batches // each) * micro_s for each in workers}
    assert seconds[plan.most_workers] == pytest.approx(TRAIN_STEP_S * devices)
    for fewer, more in pairwise(workers):
        assert seconds[fewer] > seconds[more]
        # The last micro-batch of a step, for which not all have one, is all that is lost.
        assert seconds[fewer] - micro_s < seconds[plan.most_workers] * plan.most_workers / fewer + 1e-9


def test_at_best_the_job_has_what_the_load_leaves_at_each_moment() -> None:
    assert SharingPlan().at_best() is None
    best = {devices: SharingPlan(load="day", paced=True, devices=devices).at_best() for devices in (4, 8, 16)}
    assert 1 < best[4] < best[8] < best[16] < 2 - 2 * 0.2  # type: ignore[operator]
    # A third of the time at the top, which leaves 2 of 4, and 3 otherwise.
    bursts = SharingPlan(load="bursts", paced=True, minutes=600.0).at_best()
    assert bursts == pytest.approx((2 / 3 * 3 + 1 / 3 * 2) / 2, abs=0.06)


@pytest.mark.parametrize("load", [load for load in LOADS if load != STEPS])
def test_at_its_top_a_load_takes_four_fifths_of_what_the_fixed_split_keeps(load: str) -> None:
    plan = SharingPlan(load=load, paced=True, minutes=24.0)
    due = plan.shape().due_times(0)
    a_minute = [sum(at <= each < at + 60 for each in due) / 60 for at in range(0, 24 * 60, 60)]
    in_flight = max(a_minute) * plan.answer_s
    assert in_flight / (plan.most_replicas * ONGOING) == pytest.approx(0.8, abs=0.3)
