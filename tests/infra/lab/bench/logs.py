"""Logs as broker, app and job write them, made by hand; times in seconds from some hour."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from infra.lab.bench.load_course import Round

HOUR = datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp()
JOB, APP = "job/j", "app/a"


def at(second: float) -> float:
    """Unix time."""
    return HOUR + second


def iso(second: float) -> str:
    """As logs have it."""
    return datetime.fromtimestamp(at(second), UTC).isoformat(timespec="milliseconds")


def node(
    second: float, name: str, cpus: float, cause: str = "node_joined", foreign: float = 0
) -> dict[str, Any]:
    strangers = {"CPU": foreign} if foreign else {}
    resources = {"CPU": cpus} if cpus else {}
    return {
        "time": iso(second),
        "cause": cause,
        "node": name,
        "resources": resources,
        "foreign": strangers,
    }


def lease(
    second: float, cause: str, holder: str, before: int, after: int, held: int, unit: float = 1
) -> dict[str, Any]:
    """An event of a grant; all units are on one node."""

    def on(units: int) -> Mapping[str, int]:
        return {"n": units} if units else {}

    return {
        "time": iso(second),
        "cause": cause,
        "holder": holder,
        "kind": "training" if holder == JOB else "serving",
        "unit": {"CPU": unit},
        "before": on(before),
        "after": on(after),
        "held": on(held),
    }


def wanted(second: float, before: int, replicas: int) -> dict[str, Any]:
    return {"time": iso(second), "kind": "wanted", "before": before, "replicas": replicas}


def ready(second: float, replica: str, started: float, ready: float) -> dict[str, Any]:
    times = {"started_at": iso(started), "ready_at": iso(ready)}
    return {"time": iso(second), "kind": "replica_ready", "replica": replica, **times}


def resized(second: float, joined: int = 0, left: int = 0) -> dict[str, Any]:
    return {"time": iso(second), "kind": "resized", "joined": ["g"] * joined, "left": ["h"] * left}


def step(second: float, number: int, workers: int, samples: int = 10) -> dict[str, Any]:
    return {"time": iso(second), "step": number, "world_size": workers, "samples": samples}


def turn(rose: float, fell: float, ended: float, before: int = 3, under_load: int = 2) -> Round:
    return Round(at(rose), at(fell), at(ended), before, under_load)
