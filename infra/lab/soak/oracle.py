"""What must hold of a soak, whatever was done to it: pure, from what was written down."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from infra.lab.bench.asking import FailedRequest

REFUSED = (429, 503)
"""Answers that refuse a request and say when to come back (HTTP status)."""
TIMED_OUT = 504
"""The answer to a request that took longer than its app allows."""


def check_steps(
    job: str,
    lines: Sequence[Mapping[str, Any]],
    steps: int,
    checkpoints: Collection[int],
    losses: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """Every step once and in order; steps are done again only from a checkpoint on, after a failure.

    A replica group that was thought lost may come back: then the job goes on from where that was.

    Args:
        lines: those of the job's metrics.jsonl, as they were written.
        steps: how many the job had to do.
        checkpoints: steps that were saved, or were to be.
        losses: replica groups of one rank that failed or left: when (ISO 8601), and which. A job that has
            lost all of them goes on from a checkpoint without another attempt.
    """
    wrong = []
    missing = sorted(set(range(1, steps + 1)) - {line["step"] for line in lines})
    if missing:
        wrong.append(f"{job}: {len(missing)} of {steps} steps are missing, first {missing[0]}")
    left_off: set[tuple[int, int]] = set()  # attempts and steps after which some group was thought lost
    for before, after in pairwise(lines):
        step, attempt = after["step"], after["attempt"]
        after_what = f"after step {before['step']} of attempt {before['attempt']}"
        came_back = (attempt, step - 1) in left_off
        if (before["attempt"], before["step"]) != (attempt, step - 1):
            left_off.add((before["attempt"], before["step"]))
        if attempt < before["attempt"] or (step > before["step"] + 1 and not came_back):
            wrong.append(f"{job}: attempt {attempt} goes on with step {step} {after_what}")
        elif step <= before["step"]:
            lost = {group for at, group in losses if before["time"] <= at <= after["time"]}
            if attempt == before["attempt"] and len(lost) < before["world_size"]:
                of = f"{len(lost)} of {before['world_size']} groups were lost"
                wrong.append(f"{job}: step {step} is done again {after_what}, though {of}")
            elif step - 1 not in {0, *checkpoints}:
                wrong.append(f"{job}: step {step} is done again {after_what}, from no checkpoint")
    return wrong


def check_losses(
    job: str, lines: Sequence[Mapping[str, Any]], reference: Mapping[int, float], tolerance: float
) -> list[str]:
    """Losses are those of the undisturbed run.

    Args:
        reference: loss by step.
        tolerance: relative; 0 where not even the order of summation may differ.
    """
    wrong = []
    for line in lines:
        expected = reference[line["step"]]
        if not abs(line["loss"] - expected) <= tolerance * abs(expected):  # of NaN neither is true
            wrong.append(
                f"{job}: the loss of step {line['step']} is {line['loss']!r}, undisturbed {expected!r}"
            )
    return wrong[:3]


def outcome(failure: FailedRequest) -> str:
    """What became of a request that was not answered.

    It was refused, timed out or broken off, each with a reason, or lost.
    """
    if failure.told and failure.status in REFUSED:
        return "refused"
    if failure.told and failure.status == TIMED_OUT:
        return "timed_out"
    return "broken" if failure.told and failure.status == 200 else "lost"


def check_requests(failures: Iterable[FailedRequest]) -> list[str]:
    """Every request was answered, or came to another end with a reason."""
    lost: dict[str, list[float]] = {}
    for failure in failures:
        if outcome(failure) == "lost":
            lost.setdefault(failure.reason, []).append(failure.sent)
    most = sorted(lost.items(), key=lambda each: -len(each[1]))
    return [
        f"{len(sent)} requests were lost ({reason}), the first one sent at {_clock(min(sent))}"
        for reason, sent in most[:3]
    ]


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"


def check_left(
    leases: Sequence[Mapping[str, Any]], processes: Sequence[str], files: Sequence[str]
) -> list[str]:
    """No lease, process or file is left behind."""
    wrong = [f"the lease of {lease['holder']} is left" for lease in leases]
    wrong += [f"process {process} is left" for process in processes]
    return wrong + [f"{file} is left" for file in files]
