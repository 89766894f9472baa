"""What a job does in a second, and what it would have done undisturbed with the workers it had. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from infra.lab.bench.load_course import time_of

Line = Mapping[str, Any]


def rate(lines: Sequence[Line], since: float, until: float) -> float:
    """Samples a second between the first step that ended in this time and the last.

    Raises:
        ValueError: fewer than two steps did.
    """
    inside = [line for line in lines if since <= time_of(line) <= until]
    if len(inside) < 2:
        raise ValueError("a rate needs two steps")
    return sum(line["samples"] for line in inside[1:]) / (time_of(inside[-1]) - time_of(inside[0]))


def done(lines: Iterable[Line], since: float, until: float) -> int:
    """Samples of the steps that ended in this time."""
    return sum(line["samples"] for line in lines if since < time_of(line) <= until)


def stepping(lines: Iterable[Line], since: float, until: float) -> list[tuple[float, float, int]]:
    """With how many workers the job stepped when: spans of time, from and to, with the workers.

    From the end of one step to that of the next they are the next one's; after the last, the last one's.
    """
    spans, now, workers = [], since, 0
    for line in lines:
        when, workers = time_of(line), line["world_size"]
        if now < when <= until:
            spans.append((now, when, workers))
            now = when
        elif when > until:
            break
    return [*spans, (now, until, workers)] if now < until else spans


def ideal(spans: Iterable[tuple[float, float, int]], rates: Mapping[int, float]) -> float:
    """The samples that are done in these spans of time at the rates of these numbers of workers.

    Args:
        spans: from and to, in seconds, with the workers.
        rates: samples a second, by workers; another number counts in proportion to the nearest of them.
    """
    return sum((to - since) * _rate_of(workers, rates) for since, to, workers in spans)


def worker_seconds(spans: Iterable[tuple[float, float, int]]) -> float:
    """Seconds times workers."""
    return sum((to - since) * workers for since, to, workers in spans)


def _rate_of(workers: int, rates: Mapping[int, float]) -> float:
    nearest = min(rates, key=lambda measured: (abs(measured - workers), measured))
    return rates[nearest] * workers / nearest


def longest_pause(lines: Sequence[Line]) -> float:
    """The longest time between the ends of two steps, in seconds; 0 of fewer than two."""
    return max((time_of(b) - time_of(a) for a, b in pairwise(lines)), default=0.0)
