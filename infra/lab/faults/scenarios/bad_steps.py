"""What happens to what ranks compute: losses that are no numbers or far too great, and a slow rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from infra.lab.bench.own_cluster import OwnJob
from infra.lab.faults.fault_course import seconds
from infra.lab.faults.laboratory import VICTIM, Laboratory, job_config, wait_between_checkpoints
from infra.lab.faults.scenario import FaultOutcome, Scenario, Trial
from infra.lab.faults.task import SLOWER, Order

NAMED_WITHIN_STEPS = 20
_SPIKE = {"policy": "go_back", "window_steps": 16, "threshold": 100.0}


def end_at_nan(lab: Laboratory, repeats: int) -> FaultOutcome:
    """Until `shoal jobs` would say that the job has failed; its error names the loss and the step."""
    trials, wrong = [], []
    for _ in range(repeats):
        job = _submit(lab, non_finite_loss="stop")
        wait_between_checkpoints(job)
        began = time.time()
        lab.order(VICTIM, Order.NAN)
        finished = _event(job, "finished", 0)
        step = max(line["step"] for line in job.metrics())
        if finished["status"] != "failed" or f"loss is nan in step {step + 1}" not in finished["error"]:
            wrong.append(f"the job has {finished['status']}, with the error {finished['error']!r}")
        wrong += lab.wrong(job)
        trials.append(Trial(seconds(finished) - began, "it has ended, with a sentence"))
    return FaultOutcome(trials, wrong)


def skip_a_nan(lab: Laboratory, repeats: int) -> FaultOutcome:
    job = _submit(lab, non_finite_loss="skip")
    trials, wrong = [], []
    for _ in range(repeats):
        wait_between_checkpoints(job)
        began, seen = time.time(), len(job.events("step_skipped"))
        lab.order(VICTIM, Order.NAN)
        skipped = _event(job, "step_skipped", seen)
        line = _line(job, began, lambda line, after=skipped["step"]: line["step"] > after)  # type: ignore[misc]
        trials.append(Trial(seconds(line) - began, "where it was", found_s=seconds(skipped) - began))
    steps = [event["step"] for event in job.events("step_skipped")]
    if (said := [line["step"] for line in job.metrics() if line.get("skipped")]) != steps:
        wrong.append(f"steps {steps} were skipped, and the metrics say so of {said}")
    return FaultOutcome(trials, wrong + lab.wrong(job, before_step=steps[0]))


def go_back_from_a_nan(lab: Laboratory, repeats: int) -> FaultOutcome:
    return _goes_back(lab, repeats, Order.NAN, non_finite_loss="go_back")


def go_back_from_a_spike(lab: Laboratory, repeats: int) -> FaultOutcome:
    return _goes_back(lab, repeats, Order.SPIKE, loss_spike=_SPIKE)


def _goes_back(lab: Laboratory, repeats: int, order: Order, **recovery: Any) -> FaultOutcome:
    job = _submit(lab, go_backs=1000, **recovery)
    trials = []
    for _ in range(repeats):
        wait_between_checkpoints(job)
        began, seen = time.time(), len(job.events("went_back"))
        lab.order(VICTIM, order)
        back = _event(job, "went_back", seen)
        line = _line(job, began, lambda line, state=back["to"]: line["step"] == state + 1)  # type: ignore[misc]
        trials.append(
            Trial(
                seconds(line) - began,
                "checkpoint",
                found_s=seconds(back) - began,
                repeated=back["step"] - 1 - back["to"],
            )
        )
    return FaultOutcome(trials, lab.wrong(job, before_step=job.events("went_back")[0]["step"]))


def slow_a_rank_down(lab: Laboratory, repeats: int) -> FaultOutcome:
    """Until the rank is named; then it is as fast as the others again, and that is said, too."""
    job = lab.cluster.submit("whole")
    trials, wrong = [], []
    for _ in range(repeats):
        job.until_steps(NAMED_WITHIN_STEPS)
        before, seen = job.metrics()[-1]["step"], len(job.events("straggler"))
        began = time.time()
        lab.order(VICTIM, Order.SLOW)
        named = _event(job, "straggler", seen)
        lab.order(VICTIM, Order.FAST)
        _event(job, "straggler_over", seen)
        steps = named["step"] - before
        if named["rank"] != VICTIM or steps > NAMED_WITHIN_STEPS:
            wrong.append(f"rank {named['rank']} was named after {steps} steps; it was rank {VICTIM}")
        trials.append(
            Trial(
                seconds(named) - began,
                "where it was",
                found_s=seconds(named) - began,
                seen=f"named after {steps} steps as {named['times_slower']:.1f} times slower",
            )
        )
    return FaultOutcome(trials, wrong + lab.wrong(job))


def _submit(lab: Laboratory, **recovery: Any) -> OwnJob:
    usual = job_config(lab.orders)["recovery"]
    return lab.cluster.submit("whole", {"recovery": {**usual, **recovery}})


def _event(job: OwnJob, kind: str, seen: int) -> dict[str, Any]:
    """The next of its kind after so many."""
    event: dict[str, Any] = job.until(lambda: job.events(kind)[seen:], f"nothing says {kind}")[0]
    return event


def _line(job: OwnJob, since: float, which: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first line of metrics since then that is such a one."""

    def found() -> list[dict[str, Any]]:
        return [line for line in job.metrics() if seconds(line) >= since and which(line)]

    line: dict[str, Any] = job.until(found, "no step was done after the fault")[0]
    return line


SCENARIOS = (
    Scenario("loss-nan", "the loss of a rank is NaN: the job ends with a sentence", end_at_nan),
    Scenario(
        "loss-nan-skipped",
        "the loss of a rank is NaN, with non_finite_loss skip: the step changes nothing",
        skip_a_nan,
    ),
    Scenario(
        "loss-nan-goes-back",
        "the loss of a rank is NaN, with non_finite_loss go_back: the ranks load the newest checkpoint",
        go_back_from_a_nan,
    ),
    Scenario(
        "loss-spike",
        "the loss of a rank is far too great, with loss_spike go_back: the ranks load the newest checkpoint",
        go_back_from_a_spike,
    ),
    Scenario(
        "straggler",
        f"a rank computes {SLOWER:g} times slower: until the job names it, from the steps that it was slow",
        slow_a_rank_down,
    ),
)
