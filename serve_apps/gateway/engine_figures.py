"""What the apps' engines say of themselves, as metrics: gauges of each replica, counters of each app."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

GAUGES: Mapping[str, tuple[str, str]] = {
    "running": ("shoal_engine_running_requests", "Requests that the replica's engine answers."),
    "waiting": ("shoal_engine_waiting_requests", "Requests that wait in the replica's engine."),
    "cache_use": ("shoal_engine_kv_cache_usage_ratio", "Part of the KV cache that requests hold, 0 to 1."),
    "cache_tokens": ("shoal_engine_kv_cache_size_tokens", "Tokens for which the KV cache has room."),
    "cache_bytes": ("shoal_engine_kv_cache_size_bytes", "Memory that the KV cache takes on one rank."),
}
"""By field of `Statistics`: name and help; labels `app` and `replica`."""
COUNTERS: Mapping[str, tuple[str, str]] = {
    "preempted": (
        "shoal_engine_preemptions",
        "Times that a request gave up its place in the KV cache for another.",
    ),
    "prompt_tokens": ("shoal_engine_prompt_tokens", "Tokens of prompts that engines have taken in."),
    "found_tokens": (
        "shoal_engine_prefix_cache_hit_tokens",
        "Tokens of prompts that were in the KV cache already.",
    ),
    "generated_tokens": ("shoal_engine_generated_tokens", "Tokens that engines have generated."),
    "steps": ("shoal_engine_steps", "Forward passes."),
}
"""By field of `Statistics`: name (without `_total`) and help; label `app`."""

FORGET_S = 600.0
"""How long the counts of a replica that is silent are remembered: it may only have been out of reach."""


class EngineFigures(Collector):
    """Figures of the replicas that are there; what is gone has no gauges, and is kept in its app's counters.

    A counter has what has happened since this process began, as Prometheus takes counters to be: of a replica
    that was there before, what comes from now on.

    Args:
        began: when this process did (steady clock).
    """

    def __init__(self, began: float | None = None) -> None:
        self._began = time.monotonic() if began is None else began
        self._engines: dict[str, Mapping[str, Mapping[str, Any]]] = {}
        self._totals: dict[tuple[str, str], float] = {}
        """By app and field."""
        self._known: dict[tuple[str, str], tuple[float, dict[str, float]]] = {}
        """By app and replica: when it was heard of last (steady clock), and its counts then."""

    def take_over(self, engines: Mapping[str, Mapping[str, Mapping[str, Any]]], now: float) -> None:
        """Go by what the engines say now, by app and replica: the fields of `Statistics`, and `ready_s`,
        for how long each is ready. No clock of another host is looked at.

        Args:
            now: on a steady clock, seconds.
        """
        for app in self._engines.keys() - engines.keys():
            self._forget(app)
        self._engines = dict(engines)
        for app, replicas in engines.items():
            for field in COUNTERS:
                self._totals.setdefault((app, field), 0.0)
            for replica, figures in replicas.items():
                self._count(app, replica, figures, now)
        for key in [key for key, (heard, _) in self._known.items() if now - heard > FORGET_S]:
            del self._known[key]

    def collect(self) -> Iterable[Metric]:
        """Called by the registry for each page."""
        for field, (name, help_) in GAUGES.items():
            gauge = GaugeMetricFamily(name, help_, labels=("app", "replica"))
            for app, replicas in self._engines.items():
                for replica, figures in replicas.items():
                    gauge.add_metric((app, replica), figures[field])
            yield gauge
        for field, (name, help_) in COUNTERS.items():
            counter = CounterMetricFamily(name, help_, labels=("app",))
            for app in self._engines:
                counter.add_metric((app,), self._totals[app, field])
            yield counter

    def _count(self, app: str, replica: str, figures: Mapping[str, Any], now: float) -> None:
        counts = {field: float(figures[field]) for field in COUNTERS}
        _, before = self._known.get((app, replica), (now, None))
        self._known[app, replica] = now, counts
        if before is None:
            new = figures["ready_s"] < now - self._began
            before = dict.fromkeys(COUNTERS, 0.0) if new else counts
        for field, count in counts.items():
            # An engine that counts from 0 again has counted that much since.
            self._totals[app, field] += count - before[field] if count >= before[field] else count

    def _forget(self, app: str) -> None:
        for key in [key for key in self._known if key[0] == app]:
            del self._known[key]
        for field in COUNTERS:
            del self._totals[app, field]
