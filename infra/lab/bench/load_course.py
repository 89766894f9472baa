"""The course of a rise and a fall of load, from what broker, app and job have logged of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

Line = Mapping[str, Any]
Moments = dict[str, float | None]
"""By name, in the order in which they should come: when it was so (Unix time); None where nothing says so."""

TO_FIRST_TOKEN = {
    "decision": "the broker tells training to give a device up",
    "step boundary": "the group has said goodbye, the others step without it",
    "way out": "its process has ended, the broker knows that the device is free",
    "grant": "the app is granted the device",
    "placement": "a replica that stands by is told to have an engine there",
    "model load": "its engine has its weights, and can answer",
    "first token": "a client has a token of it",
}
"""The parts from an app's want to the first token of the new replica: each ends when this is so."""

TO_STEP = {
    "release": "the replica has answered its last request, its device is free",
    "grant": "training is granted the device",
    "group start": "a step was done with it",
}
"""The parts from the want for fewer replicas to training's step on the device."""


@dataclass(frozen=True)
class Round:
    """One rise and fall of a load. Times are Unix times.

    Attributes:
        rose, fell: when the load did.
        ended: when the next round may begin.
        workers_before, workers_under_load: with which the job stepped when the load rose and when it fell.
    """

    rose: float
    fell: float
    ended: float
    workers_before: int
    workers_under_load: int


@dataclass(frozen=True)
class Logs:
    """What was logged while it happened, each oldest first.

    Attributes:
        broker: the events of the cluster's broker.
        app: those of the app.
        job: those of the job.
        metrics: the lines of the job's steps.
        job_holder, app_holder: whose leases they are.
    """

    broker: Sequence[Line]
    app: Sequence[Line]
    job: Sequence[Line]
    metrics: Sequence[Line]
    job_holder: str
    app_holder: str


def time_of(event: Line, field: str = "time") -> float:
    """When an event was, in Unix time."""
    return datetime.fromisoformat(event[field]).timestamp()


def rise(logs: Logs, turn: Round, first_tokens: Iterable[tuple[float, str]]) -> Moments:
    """From the load's rise over the app's want to the first token of the new replica.

    Args:
        first_tokens: when a request had its first token, and of which replica.
    """
    since = turn.rose
    wanted = _first(logs.app, since, lambda e: e["kind"] == "wanted" and e["replicas"] > e["before"])
    decided = _first(_of(logs.broker, logs.job_holder), since, lambda e: e["cause"] == "gave_way")
    stepped = _first(logs.job, since, lambda e: e["kind"] == "resized" and bool(e["left"]))
    freed = _change(_of(logs.broker, logs.job_holder), since, "held", -1)
    granted = _change(_of(logs.broker, logs.app_holder), since, "after", +1)
    new = next((e for e in logs.app if e["kind"] == "replica_ready" and time_of(e) >= since), None)
    # A replica may have had an engine before, and given it back.
    began = time_of(new, "started_at") if new else since
    tokens = (when for when, replica in first_tokens if new and replica == new["replica"] and when >= began)
    return {
        "load": since,
        "want": wanted,
        "decision": decided,
        "step boundary": stepped,
        "way out": freed,
        "grant": granted,
        "placement": time_of(new, "started_at") if new else None,
        "model load": time_of(new, "ready_at") if new else None,
        "first token": min(tokens, default=None),
    }


def fall(logs: Logs, turn: Round) -> Moments:
    """From the load's fall over the want for fewer replicas to training's step on the device."""
    since = turn.fell
    wanted = _first(logs.app, since, lambda e: e["kind"] == "wanted" and e["replicas"] < e["before"])
    released = _change(_of(logs.broker, logs.app_holder), since, "held", -1)
    granted = _change(_of(logs.broker, logs.job_holder), since, "after", +1)
    stepped = _first(logs.metrics, since, lambda line: line["world_size"] > turn.workers_under_load)
    return {
        "load": since,
        "want": wanted,
        "release": released,
        "grant": granted,
        "group start": stepped,
    }


def parts(moments: Moments) -> dict[str, float | None]:
    """How long it took from each moment to the next, in seconds; None where either was not logged."""
    return {
        name: None if before is None or after is None else after - before
        for (_, before), (name, after) in pairwise(moments.items())
    }


def between(moments: Moments, first: str, last: str) -> float | None:
    """The seconds from one moment to another; None where either was not logged."""
    before, after = moments[first], moments[last]
    return None if before is None or after is None else after - before


def lost_and_repeated(metrics: Iterable[Line]) -> tuple[list[int], list[int]]:
    """The steps that were never logged, and those that were logged more than once.

    Args:
        metrics: the lines of a job as they were logged, from its first on.
    """
    steps = [line["step"] for line in metrics]
    seen: set[int] = set()
    repeated = sorted({step for step in steps if step in seen or seen.add(step)})  # type: ignore[func-returns-value]
    lost = sorted(set(range(min(steps), max(steps) + 1)) - seen) if steps else []
    return lost, repeated


def _of(events: Iterable[Line], holder: str) -> list[Line]:
    return [event for event in events if event.get("holder") == holder]


def _first(events: Iterable[Line], since: float, is_it: Callable[[Line], bool]) -> float | None:
    """When the first such event since then was."""
    for event in events:
        if (when := time_of(event)) >= since and is_it(event):
            return when
    return None


def _change(events: Iterable[Line], since: float, units: str, sign: int) -> float | None:
    """When a holder's units, held or granted (`after`), first grew or became fewer since then."""
    count = 0
    for event in events:
        now = sum(event.get(units, {}).values())
        if (when := time_of(event)) >= since and (now - count) * sign > 0:
            return when
        count = now
    return None
