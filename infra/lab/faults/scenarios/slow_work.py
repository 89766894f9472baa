"""What one rank does alone for longer than a step may take: nobody takes it for a hang."""

from __future__ import annotations

from functools import partial

from infra.lab.faults.fault_course import seconds
from infra.lab.faults.laboratory import HANG_TIMEOUT_S, Laboratory
from infra.lab.faults.scenario import FaultOutcome, Scenario, Trial
from train_jobs.records.run_log import summarize

ALONE_S = HANG_TIMEOUT_S + 45.0
"""Longer than a collective of a step waits, which is half a minute more than the hang timeout."""
_STEPS = 30


def slow(what: str, lab: Laboratory, repeats: int) -> FaultOutcome:
    """Run a job to its end with one rank so slow, and see that one attempt was enough."""
    trials, wrong = [], []
    for _ in range(repeats):
        settings = {"pause_s": 0.0, "orders": str(lab.orders), what: ALONE_S}
        saves = {"every_steps": _STEPS, "keep": 1}
        job = lab.cluster.submit("whole", {"steps": _STEPS, "settings": settings, "checkpoint": saves})
        finished = job.until(partial(job.events, "finished"), "the job did not end", timeout_s=300.0)[0]
        lines = job.metrics()
        if finished["status"] != "succeeded" or job.events("failed"):
            reasons = [event["reason"] for event in job.events("failed")]
            wrong.append(f"the job has {finished['status']}, after {reasons}")
            continue
        started, last = seconds(job.events("started")[0]), seconds(lines[-1])
        took = seconds(lines[0]) - started if what == "data_s" else seconds(finished) - last
        whole = seconds(finished) - seconds(job.events("leased")[0])
        if whole < ALONE_S:
            wrong.append(f"the job took {whole:.1f} s, and was not slow")
        attempts = summarize(job.job, job.run).attempts
        if attempts != 1:
            wrong.append(f"it took {attempts} attempts")
        trials.append(Trial(took, "it has ended, at its first attempt"))
        wrong += lab.wrong(job)
    return FaultOutcome(trials, wrong)


SCENARIOS = (
    Scenario(
        "slow-export",
        f"rank 0 takes {ALONE_S:.0f} s to export, with hang_timeout_s {HANG_TIMEOUT_S:g}: the job succeeds",
        lambda lab, repeats: slow("export_s", lab, repeats),
    ),
    Scenario(
        "slow-data",
        f"a rank opens data for {ALONE_S:.0f} s, with hang_timeout_s {HANG_TIMEOUT_S:g}: the job succeeds",
        lambda lab, repeats: slow("data_s", lab, repeats),
    ),
)
