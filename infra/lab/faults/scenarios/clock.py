"""What happens when the wall clock jumps: leases, heartbeats and the watch for hangs go by another."""

from __future__ import annotations

import time

from cluster.files.storage import Storage
from infra.lab.bench.own_cluster import OwnJob
from infra.lab.faults.clock import missing, movable_clock
from infra.lab.faults.laboratory import (
    HANG_TIMEOUT_S,
    HEARTBEAT_TIMEOUT_S,
    LONG_PAUSE_S,
    OTHER_ORDER,
    Laboratory,
)
from infra.lab.faults.processes import rank_process
from infra.lab.faults.scenario import ClusterUse, FaultOutcome, Scenario, Trial
from infra.lab.faults.scenarios.workers import GROUPS, wait_for_groups
from infra.lab.faults.waiting import wait_for
from train_jobs.records.listing import list_jobs

_HOUR_S = 3600
_WATCHED_S = 1.2 * HANG_TIMEOUT_S
"""Longer than any time that a job could be taken for hung, lost or without a lease."""
_LOOK_S = 0.02
_STEPS_WATCHED = round(3 * _WATCHED_S / LONG_PAUSE_S)
_STEPS_BESIDE = 400
"""Until the groups step together, in the beginning and in the end, and while the job stops."""


def jump(lab: Laboratory, repeats: int) -> FaultOutcome:
    """An hour ahead, an hour behind and back, for every process of the cluster; then a rank is killed."""
    with movable_clock(lab.directory) as clock, lab.own_cluster() as cluster:
        # Before: for as long as a clock went back, Ray starts no placement group where one was removed.
        lab.undisturbed(repeats * _STEPS_WATCHED + _STEPS_BESIDE, cluster)
        job = cluster.submit("groups", lab.long_steps)
        trials, wrong = [], []
        wait_for_groups(job)
        for _ in range(repeats):
            pauses = []
            for ahead in (_HOUR_S, -_HOUR_S, 0):
                clock.jump(ahead)
                pauses.append(_longest_pause(job, _WATCHED_S))
            if max(pauses) > HEARTBEAT_TIMEOUT_S:
                wrong.append(f"the job stood still for {max(pauses):.1f} s after a jump")
            trials.append(Trial(max(pauses), "where it was"))
        wrong += [f"group {event['group']} failed: {event['reason']}" for event in job.events("failed")]
        wrong += [f"groups {event['lost']} were lost" for event in job.events("resized") if event["lost"]]
        list_jobs(Storage(cluster.record.storage))  # times that go back must not trouble whoever counts them
        rank_process(job, 0).kill()
        wait_for(lambda: any(event["lost"] for event in job.events("resized")), "no group was lost")
        wait_for_groups(job, GROUPS)
        return FaultOutcome(trials, wrong + lab.wrong(job, OTHER_ORDER))


def _longest_pause(job: OwnJob, for_s: float) -> float:
    """The longest time without a step, by this process's clock."""
    longest, seen, last = 0.0, len(job.metrics()), time.monotonic()
    until = last + for_s
    while (now := time.monotonic()) < until:
        if (count := len(job.metrics())) > seen:
            longest, seen, last = max(longest, now - last), count, now
        time.sleep(_LOOK_S)
    return max(longest, time.monotonic() - last)


SCENARIOS = (
    Scenario(
        "clock-jumps",
        "the wall clock of all nodes jumps by an hour, ahead and back: nothing is taken for late",
        jump,
        missing,
        use=ClusterUse.OWN,
    ),
)
