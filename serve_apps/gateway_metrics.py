"""What the gateway counts, in Prometheus' format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class GatewayMetrics:
    """The gateway's counters; `app` is empty where a request named no app that is there."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "shoal_gateway_requests",
            "Requests by their answer's status.",
            ("app", "endpoint", "status"),
            registry=self._registry,
        )
        self.errors = Counter(
            "shoal_gateway_errors",
            "Requests that ended with an error, also those that broke off in the stream.",
            ("app", "code"),
            registry=self._registry,
        )
        self.tokens = Counter(
            "shoal_gateway_tokens",
            "Tokens of prompts and of answers.",
            ("app", "kind"),
            registry=self._registry,
        )
        self.latency = Histogram(
            "shoal_gateway_request_seconds",
            "Time from a request's arrival to the end of its answer.",
            ("app", "endpoint"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "shoal_gateway_first_token_seconds",
            "Time from a request's arrival to its first tokens.",
            ("app", "endpoint"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "shoal_gateway_in_flight",
            "Answers (choices) that run or wait.",
            ("app",),
            registry=self._registry,
        )
        self.cancelled = Counter(
            "shoal_gateway_cancelled",
            "Requests whose client went away before the end.",
            ("app",),
            registry=self._registry,
        )

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)
