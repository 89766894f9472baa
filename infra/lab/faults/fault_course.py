"""What a fault did to a job, as the job's own logs tell it: pure logic on their lines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Line = Mapping[str, Any]


def seconds(line: Line) -> float:
    """When a line was written, since the epoch."""
    return datetime.fromisoformat(line["time"]).timestamp()


@dataclass(frozen=True)
class Resumption:
    """How a job went on.

    Attributes:
        time: of the first step after the fault, in seconds since the epoch.
        from_step: the state it went on from had done so many steps.
        repeated: steps that were done again.
        lost: steps that stand nowhere.
    """

    time: float
    from_step: int
    repeated: int
    lost: int


def resumption(metrics: Sequence[Line], attempt: int) -> Resumption | None:
    """How it went on in this attempt or a later one; None while it has not.

    Args:
        metrics: every line as it was logged.
    """
    place = next((index for index, line in enumerate(metrics) if line["attempt"] >= attempt), None)
    return None if place is None else _resumption_at(metrics, place)


def resumption_beyond(metrics: Sequence[Line], step: int) -> Resumption | None:
    """How it went on without going back, by the first step beyond this one; None while it has not."""
    place = next((index for index, line in enumerate(metrics) if line["step"] > step), None)
    return None if place is None else _resumption_at(metrics, place)


def _resumption_at(metrics: Sequence[Line], place: int) -> Resumption:
    line = metrics[place]
    before = max((each["step"] for each in metrics[:place]), default=0)
    state = line["step"] - 1
    return Resumption(seconds(line), state, max(0, before - state), max(0, state - before))


def longest_gap_s(metrics: Sequence[Line], since: float) -> float:
    """The longest time without a step, from the last step before `since` (seconds since the epoch) on."""
    times = [seconds(line) for line in metrics]
    first = max(0, sum(time < since for time in times) - 1)
    return max((b - a for a, b in itertools.pairwise(times[first:])), default=0.0)


def wrong_steps(
    metrics: Sequence[Line], checkpoints: Sequence[int], went_back: Sequence[int] = ()
) -> list[str]:
    """What must not be: steps that are missing or out of order, or done again from nowhere.

    Args:
        checkpoints: every step that was ever saved.
        went_back: the steps that an attempt went back to by itself, of a checkpoint each.
    """
    found = []
    steps = {line["step"] for line in metrics}
    missing = sorted(set(range(1, max(steps, default=0) + 1)) - steps)
    if missing:
        found.append(f"steps {missing} were never done")
    for before, line in itertools.pairwise(metrics):
        if line["step"] == before["step"] + 1:
            continue
        state = line["step"] - 1
        if line["attempt"] == before["attempt"] and state not in went_back:
            found.append(f"step {line['step']} follows step {before['step']} in attempt {line['attempt']}")
        elif state not in {0, *checkpoints}:
            found.append(f"attempt {line['attempt']} goes on from step {state}, where nothing was saved")
    return found


def wrong_losses(metrics: Sequence[Line], undisturbed: Mapping[int, float], tolerance: float) -> list[str]:
    """Losses that are not those of an undisturbed run. A loss is a mean of squared errors.

    Args:
        undisturbed: the loss of every step.
        tolerance: of the root of the loss; 0 asks for the same bits. What predictions differ by does not get
            smaller with the loss, so that no part of a loss can be allowed.
    """
    other = [line for line in metrics if not _is_close(line["loss"], undisturbed[line["step"]], tolerance)]
    if not other:
        return []
    first = other[0]
    expected = undisturbed[first["step"]]
    return [
        f"{len(other)} losses are not those of an undisturbed run, the first of step {first['step']}: "
        f"{first['loss']!r} instead of {expected!r}"
    ]


def _is_close(loss: float, expected: float, tolerance: float) -> bool:
    if tolerance == 0.0:
        return loss == expected
    return abs(math.sqrt(loss) - math.sqrt(expected)) <= tolerance  # of NaN it is not true
