"""What sharing measured, in figures: the course of the rounds, both sides beside each other. Pure."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cluster.wording import counted
from infra.lab.bench import training_rate
from infra.lab.bench.device_time import answering_s, device_time, granted
from infra.lab.bench.load_course import (
    TO_FIRST_TOKEN,
    TO_STEP,
    Moments,
    between,
    fall,
    lost_and_repeated,
    parts,
    rise,
)
from infra.lab.bench.sharing_plan import SharingPlan
from infra.lab.bench.side import CALLED, DEVICE, FIXED, RAY, SHARING, Side
from infra.lab.bench.training_rate import done, ideal, stepping, worker_seconds

LISTED = 3
"""Failures that are told of in words."""


def document(plan: SharingPlan, sides: Mapping[str, Side]) -> dict[str, Any]:
    """What `shoal bench sharing` prints as JSON."""
    ours = {name: side for name, side in sides.items() if name != RAY}
    wrong = [problem for name, side in ours.items() for problem in problems(CALLED[name], side)]
    shared = sides[SHARING]
    found = {name: figures(side) for name, side in sides.items()}
    rises = [rise(shared.logs, turn, shared.first_tokens) for turn in shared.rounds]
    falls = [fall(shared.logs, turn) for turn in shared.rounds]
    return {
        "ok": not wrong,
        "problems": wrong,
        "device": DEVICE,
        "cores": os.cpu_count(),
        "plan": asdict(plan),
        "rounds": [_round_of(*each) for each in zip(shared.rounds, rises, falls, strict=True)],
        "first_token": _summary(rises, "want", "first token", TO_FIRST_TOKEN),
        "training_back": _summary(falls, "want", "group start", TO_STEP),
        "undisturbed_samples_per_s": {str(workers): round(r, 3) for workers, r in shared.rates.items()},
        "hand_overs": _hand_overs(shared),
        "training_gain": {"at_best": plan.at_best(), "measured": _gain(found)},
        "sides": found,
    }


def problems(name: str, side: Side) -> list[str]:
    """Why the measurement counts as failed, in sentences; none when no request and no step was lost."""
    found = []
    if side.failures:
        reasons = "; ".join(failure.reason for failure in side.failures[:LISTED])
        requests = len(side.failures) + len(side.answers)
        found.append(f"{name}: {len(side.failures)} of {requests} requests failed: {reasons}")
    lost, repeated = lost_and_repeated(side.logs.metrics)
    if lost:
        found.append(f"{name}: training lost {counted(len(lost), 'step')}, the first is {lost[0]}")
    if repeated:
        found.append(
            f"{name}: training repeated {counted(len(repeated), 'step')}, the first is {repeated[0]}"
        )
    return found


def figures(side: Side) -> dict[str, Any]:
    """One side, in the time that counts."""
    span = began, ended = side.span
    seconds = ended - began
    lines = side.logs.metrics
    spans = stepping(lines, *span)
    held = granted(side.logs.broker, side.logs.job_holder, *span)
    samples = done(lines, *span)
    inside = [answer for answer in side.answers if began <= answer.sent and answer.ended <= ended]
    waits = [answer.first - answer.sent for answer in inside]
    time = device_time(side.logs.broker, DEVICE, *span)
    serving_s = time.held["serving"] if side.serving_s is None else side.serving_s
    training_s = time.held["training"] if side.serving_s is None else worker_seconds(spans)
    nobody_s = time.nobody if side.serving_s is None else time.total - training_s - serving_s
    unanswering = serving_s - answering_s(side.answers, *span)  # a replica takes one device
    lost, repeated = lost_and_repeated(lines)
    return {
        "seconds": round(seconds, 3),
        "samples_per_s": round(samples / seconds, 3),
        "of_ideal": round(samples / ideal(spans, side.rates), 4) if side.rates else None,
        "of_granted": round(samples / ideal(held, side.rates), 4) if side.rates else None,
        "steps": len({line["step"] for line in lines}),
        "steps_lost": len(lost),
        "steps_repeated": len(repeated),
        "longest_pause_s": round(
            training_rate.longest_pause([line for line in lines if _within(line, *span)]), 3
        ),
        "requests": len(side.answers) + len(side.failures),
        "requests_failed": len(side.failures),
        "requests_per_s": round(len(inside) / seconds, 3),
        "tokens_per_s": round(sum(answer.tokens for answer in inside) / seconds, 3),
        "first_token_p50_s": _percentile(waits, 0.5),
        "first_token_p99_s": _percentile(waits, 0.99),
        "device_seconds": round(time.total, 3),
        "device_seconds_training": round(training_s, 3),
        "device_seconds_stepping": round(worker_seconds(spans), 3),
        "device_seconds_serving": round(serving_s, 3),
        "device_seconds_nobody": round(nobody_s, 3),
        "device_seconds_unasked": round(unanswering, 3),
        "idle": round((nobody_s + unanswering) / time.total, 4),
    }


def table(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """All sides, figure by figure: what it is, and each one's."""
    sides = list(found["sides"].values())
    rows: list[tuple[str, str, Callable[[float], str]]] = [
        ("training, samples/s", "samples_per_s", "{:,.1f}".format),
        ("  of the ideal for the workers that stepped", "of_ideal", "{:.1%}".format),
        ("  of the ideal for the workers granted", "of_granted", "{:.1%}".format),
        ("  longest time between two steps", "longest_pause_s", "{:.2f} s".format),
        ("steps lost", "steps_lost", "{:,}".format),
        ("steps repeated", "steps_repeated", "{:,}".format),
        ("requests/s", "requests_per_s", "{:,.2f}".format),
        ("requests failed", "requests_failed", "{:,}".format),
        ("tokens/s", "tokens_per_s", "{:,.1f}".format),
        ("first token, p50", "first_token_p50_s", _milliseconds),
        ("first token, p99", "first_token_p99_s", _milliseconds),
        ("device-seconds in all", "device_seconds", "{:,.0f}".format),
        ("  training", "device_seconds_training", "{:,.0f}".format),
        ("    of them stepping", "device_seconds_stepping", "{:,.0f}".format),
        ("  serving", "device_seconds_serving", "{:,.0f}".format),
        ("    of them without a request", "device_seconds_unasked", "{:,.0f}".format),
        ("  nobody's", "device_seconds_nobody", "{:,.0f}".format),
        ("idle: nobody's or without a request", "idle", "{:.1%}".format),
    ]
    return [
        (words, *("–" if side[name] is None else show(side[name]) for side in sides))
        for words, name, show in rows
    ]


def course_table(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """How long devices take to change hands: what, the median of the rounds, the worst."""
    rows = []
    for kind, does in (("serving", "answers"), ("training", "steps")):
        summary = found["hand_overs"][kind]
        came = f"{counted(summary['number'], 'device')} given to {kind}: want → {does}"
        rows.append((came, *_two(summary)))
    if not found["rounds"]:
        return rows
    for title, key in (
        ("want → first token of the new replica", "first_token"),
        ("want for fewer → training's first step on the device", "training_back"),
    ):
        summary = found[key]
        rows.append((title, *_two(summary["total"])))
        rows += [(f"  {name}", *_two(each)) for name, each in summary["parts"].items()]
        rows.append(("  (before: from the load to the want)", *_two(summary["load_to_want"])))
    return rows


def _gain(found: Mapping[str, Any]) -> float | None:
    """How many times the fixed split's samples sharing has trained."""
    fixed = found[FIXED]["samples_per_s"]
    return round(found[SHARING]["samples_per_s"] / fixed, 4) if fixed else None


def _hand_overs(side: Side) -> dict[str, Any]:
    """How long devices took from the want to where they were of use, by who got them."""
    came: dict[str, list[float]] = {"training": [], "serving": []}
    for event in side.logs.broker:
        if event["cause"] == "handed_over" and _within(event, *side.span):
            came[event["kind"]].append(event["facts"]["seconds"])
    return {kind: _middle_and_worst(seconds, "number") for kind, seconds in came.items()}


def _round_of(turn: Any, up: Moments, down: Moments) -> dict[str, Any]:
    return {
        "high_s": round(turn.fell - turn.rose, 3),
        "low_s": round(turn.ended - turn.fell, 3),
        "workers_before": turn.workers_before,
        "workers_under_load": turn.workers_under_load,
        "first_token_s": _rounded(between(up, "want", "first token")),
        "first_token_parts_s": {name: _rounded(each) for name, each in parts(up).items()},
        "training_back_s": _rounded(between(down, "want", "group start")),
        "training_back_parts_s": {name: _rounded(each) for name, each in parts(down).items()},
    }


def _summary(courses: Sequence[Moments], first: str, last: str, names: Iterable[str]) -> dict[str, Any]:
    each = [parts(course) for course in courses]
    return {
        "total": _middle_and_worst(between(course, first, last) for course in courses),
        "parts": {name: _middle_and_worst(one[name] for one in each) for name in names},
        "load_to_want": _middle_and_worst(one["want"] for one in each),
    }


def _middle_and_worst(seconds: Iterable[float | None], of: str = "rounds") -> dict[str, Any]:
    known = [each for each in seconds if each is not None]
    return {
        "median_s": _rounded(statistics.median(known)) if known else None,
        "worst_s": _rounded(max(known)) if known else None,
        of: len(known),
    }


def _two(summary: Mapping[str, Any]) -> tuple[str, str]:
    values = (summary["median_s"], summary["worst_s"])
    return ("–", "–") if None in values else (f"{values[0]:.2f} s", f"{values[1]:.2f} s")


def _percentile(values: Sequence[float], part: float) -> float | None:
    """The least value that so many of them do not exceed (nearest rank); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return _rounded(ordered[max(0, math.ceil(part * len(ordered)) - 1)])


def _within(line: Mapping[str, Any], since: float, until: float) -> bool:
    return since <= training_rate.time_of(line) <= until


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
