"""Where the time of a job went: useful steps, and what was lost to which cause. Pure, from its two logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Line = Mapping[str, Any]

WAITING = "waiting"
"""For devices, after the job had had some."""
PREPARING = "preparing"
"""Text that is tokenized on the job's workers."""
STARTING = "starting"
"""From the lease to the first step; after a resubmission, the driver's start too."""
REPEATED = "repeated"
"""Steps that were lost, and done again."""
CHECKPOINTS = "checkpoints"
"""Between steps, for a checkpoint to be copied or written."""
EVALUATION = "evaluation"
RESIZING = "resizing"
"""A job of one group, from the last step with some workers to the first with another number."""
AFTER = "after_"
"""With a class of failure: from the last step before it to the first step after it, less `waiting`."""
OTHER = "other"
"""Anything else, the export and publication of the model among it."""
_FIRST = (PREPARING, STARTING, WAITING, REPEATED, CHECKPOINTS, EVALUATION, RESIZING)


@dataclass(frozen=True)
class Goodput:
    """A run's time in seconds; `useful_s` and `losses_s` add up to `wall_s`.

    Attributes:
        queued_s: from the submission to the first lease: the driver's start, preparing data, waiting.
        useful_s: steps that count, each once. Of a step that ran again, its last run counts.
        losses_s: by cause, those that cost anything.
        steps: how many steps count.
    """

    queued_s: float = 0.0
    useful_s: float = 0.0
    losses_s: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0

    @property
    def wall_s(self) -> float:
        """From the first lease to the end, or to now; without the time between an end and a resubmission."""
        return self.useful_s + sum(self.losses_s.values())

    @property
    def goodput(self) -> float | None:
        """Useful time over wall time; None where no step was logged, as of a script without `progress`."""
        return self.useful_s / self.wall_s if self.steps and self.wall_s else None

    @property
    def from_submission(self) -> float | None:
        """The same from the submission on."""
        return None if self.goodput is None else self.useful_s / (self.wall_s + self.queued_s)

    def as_json(self) -> dict[str, Any]:
        return {
            "goodput": _rounded(self.goodput, 4),
            "goodput_from_submission": _rounded(self.from_submission, 4),
            "queued_s": round(self.queued_s, 3),
            "wall_s": round(self.wall_s, 3),
            "useful_s": round(self.useful_s, 3),
            "losses_s": {cause: round(seconds, 3) for cause, seconds in self.losses_s.items()},
        }


def goodput_of(events: Sequence[Line], metrics: Sequence[Line], now_s: float | None = None) -> Goodput:
    """Account for a run's time.

    Args:
        events, metrics: all lines of its logs, each once, in their order. Lines of metrics without a time, as
            older runs have them, are placed by their attempt's start and their `step_s`.
        now_s: seconds since the epoch, for a job whose driver is there; None where the logs' end is its end.
    """
    account = _Account(last={line["step"]: number for number, line in enumerate(metrics)})
    for time_s, number, line in _in_order(events, metrics):
        if number is None:
            account.event(time_s, line)
        else:
            account.step(time_s, number, line)
    return account.close(now_s)


class _Account:
    """Goes through a run's time in order, and books each piece of it once.

    Args:
        last: for each step, the number of the line that counts.
    """

    def __init__(self, last: Mapping[int, int]) -> None:
        self._last = last
        self._booked: defaultdict[str, float] = defaultdict(float)
        self._useful_s = 0.0
        self._queued_s = 0.0
        self._steps = 0
        self._leased = False
        self._mark: float | None = None
        """Until here all time is booked; None while the job is not running."""
        self._doing = STARTING
        """What the time from the mark on is lost to, unless a step comes; OTHER between steps."""
        self._then = STARTING
        """What follows when a wait for devices is over."""
        self._resizes = False
        self._loose_s = 0.0
        """Booked as OTHER since the last checkpoint: what comes late may still say what it was."""
        self._stalled_s = 0.0
        """What a checkpoint has cost, as far as it is not booked yet."""

    def event(self, time_s: float, event: Line) -> None:
        """Take in an event; those that do not end a piece of time change nothing."""
        kind = event["kind"]
        if kind == "submitted":
            # Nobody knows how long a driver lived that did not say how it ended.
            self._mark, self._doing, self._resizes = time_s, STARTING, False
            self._loose_s = self._stalled_s = 0.0
        elif kind == "waiting" and self._doing != WAITING:
            self._book_until(time_s, RESIZING if self._resizes else self._doing)
            begins = self._doing in (OTHER, PREPARING)
            self._then = RESIZING if self._resizes else STARTING if begins else self._doing
            self._doing, self._resizes = WAITING, False
        elif kind == "leased":
            self._book_until(time_s, self._doing)
            self._doing, self._leased = self._then, True
        elif kind == "preparing" and event.get("workers"):
            self._book_until(time_s, self._doing)
            self._doing = PREPARING
        elif kind == "evaluated":
            self._book_until(time_s, EVALUATION if self._doing == OTHER else self._doing)
        elif kind == "checkpointed":
            # A save in the background is told some steps later, one in the foreground before the next step.
            stalled_s = float(event.get("stalled_s", 0.0))
            told_late_s = min(stalled_s, self._loose_s)
            self._take_loose(told_late_s)
            self._booked[CHECKPOINTS] += told_late_s
            self._stalled_s, self._loose_s = stalled_s - told_late_s, 0.0
        elif kind == "failed" and not event.get("goes_on"):
            self._doing = AFTER + event["failure_class"]
            self._book_until(time_s, self._doing)
            self._loose_s = self._stalled_s = 0.0
            self._resizes = False
        elif kind == "rebuilding":
            self._resizes = True
        elif kind == "ended":
            self._book_until(time_s, RESIZING)
            self._doing = RESIZING
        elif kind == "finished":
            self._book_until(time_s, self._doing)
            self._mark = None

    def step(self, time_s: float, number: int, line: Line) -> None:
        """Take in a step that was logged at this time, which is its end."""
        if self._mark is None:
            return
        count = line.get("count", 1)  # a script need not print every step
        passed_s, took_s = max(0.0, time_s - self._mark), float(line["step_s"]) * count
        within_s = min(passed_s, took_s)
        self._book(self._doing, passed_s - within_s)
        self._stalled_s = 0.0  # the rest was waited for within a step, and is part of that
        # A line that came late makes the next step look shorter than it was: the gap before was this step.
        late_s = min(took_s - within_s, self._loose_s)
        self._take_loose(late_s)
        if self._last[line["step"]] == number:
            self._useful_s += within_s + late_s
            self._steps += count
        else:
            self._book(REPEATED, within_s + late_s)
        self._mark, self._doing = max(time_s, self._mark), OTHER

    def close(self, now_s: float | None) -> Goodput:
        """The sums, with the time until now booked too."""
        if now_s is not None and self._mark is not None:
            self._book_until(now_s, self._doing)
        lost = {cause: seconds for cause, seconds in self._booked.items() if seconds > 1e-6}
        causes = [*_FIRST, *sorted(cause for cause in lost if cause.startswith(AFTER)), OTHER]
        losses = {cause: lost[cause] for cause in causes if cause in lost}
        return Goodput(self._queued_s, self._useful_s, losses, self._steps)

    def _book_until(self, time_s: float, cause: str) -> None:
        if self._mark is None:
            return
        passed_s = max(0.0, time_s - self._mark)
        self._book(cause, passed_s)
        self._mark += passed_s

    def _book(self, cause: str, seconds: float) -> None:
        if not self._leased:
            self._queued_s += seconds
            return
        stalled_s = min(self._stalled_s, seconds)
        self._stalled_s -= stalled_s
        self._booked[CHECKPOINTS] += stalled_s
        self._booked[cause] += seconds - stalled_s
        if cause == OTHER:
            self._loose_s += seconds - stalled_s

    def _take_loose(self, seconds: float) -> None:
        self._loose_s -= seconds
        self._booked[OTHER] -= seconds


def _in_order(events: Sequence[Line], metrics: Sequence[Line]) -> Iterator[tuple[float, int | None, Line]]:
    """Events, and steps with the number of their line, by time; within each log in the order of its lines."""
    times = [_seconds(event["time"]) for event in events]
    steps = list(_ends(events, metrics))
    at = 0
    for number, line in enumerate(metrics):
        while at < len(events) and times[at] < steps[number]:
            yield times[at], None, events[at]
            at += 1
        yield steps[number], number, line
    for rest in range(at, len(events)):
        yield times[rest], None, events[rest]


def _ends(events: Sequence[Line], metrics: Sequence[Line]) -> Iterator[float]:
    """When each step ended: as it was logged, else one after another from the attempt's start on."""
    started = {event["attempt"]: event for event in reversed(events) if event["kind"] == "started"}
    evaluated = {(event["attempt"], event["step"]): event for event in events if event["kind"] == "evaluated"}
    end_s, attempt = 0.0, None
    for line in metrics:
        if "time" in line:
            end_s = _seconds(line["time"])
        else:
            if line["attempt"] != attempt and line["attempt"] in started:
                end_s = max(end_s, _seconds(started[line["attempt"]]["time"]))
            before = evaluated.get((line["attempt"], line["step"] - 1))
            if before is not None:
                end_s = max(end_s, _seconds(before["time"]))
            end_s += float(line["step_s"])
        attempt = line["attempt"]
        yield end_s


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def _rounded(share: float | None, digits: int) -> float | None:
    return None if share is None else round(share, digits)
