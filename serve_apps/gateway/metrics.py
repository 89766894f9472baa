"""What the gateway counts, in Prometheus' formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from serve_apps.gateway.engine_figures import EngineFigures
from serve_apps.http.request_record import CLIENT_CLOSED, RequestRecord
from serve_apps.routing.decisions import decisions

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
_EXEMPLAR = "request_id"
_EXEMPLAR_CHARACTERS = 128 - len(_EXEMPLAR)
"""OpenMetrics gives an exemplar's names and values 128 characters together."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = openmetrics.CONTENT_TYPE_LATEST


class _Routing(Collector):
    """Where requests were sent, and why; see `Policy.routed`."""

    def collect(self) -> Iterable[Metric]:
        counter = CounterMetricFamily(
            "shoal_gateway_routed",
            "Answers (choices) sent to replicas, by the routing policy and what it decided by.",
            labels=("app", "policy", "reason"),
        )
        for labels, count in decisions().items():
            counter.add_metric(labels, count)
        yield counter


class _OfApps(Collector):
    """What is the same at every gateway, which one of them tells: else whoever adds up counts it twice."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.told = True
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect() if self.told else ()


class GatewayMetrics:
    """The gateway's counters.

    `app` is empty where a request named no app that is there, `endpoint` where it named no route.
    """

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
            "Tokens of prompts and of answers; `tokenized` are those of /tokenize and /detokenize.",
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
        self.output_token = Histogram(
            "shoal_gateway_output_token_seconds",
            "Time for each token of a streamed answer after its first, on average.",
            ("app", "endpoint"),
            buckets=_TOKEN_SECONDS,
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "shoal_gateway_in_flight",
            "Answers (choices) that run or wait.",
            ("app",),
            registry=self._registry,
        )
        of_apps = CollectorRegistry()
        self._of_apps = _OfApps(of_apps)
        self._replicas = Gauge(
            "shoal_app_replicas",
            "Replicas that are wanted, granted by the broker, and ready.",
            ("app", "state"),
            registry=of_apps,
        )
        self.cancelled = Counter(
            "shoal_gateway_cancelled",
            "Requests whose client went away before the end.",
            ("app",),
            registry=self._registry,
        )

        self.engines = EngineFigures()
        of_apps.register(self.engines)
        self._registry.register(self._of_apps)
        self._registry.register(_Routing())

    @property
    def tells_of_apps(self) -> bool:
        """Whether it is this gateway whose figures tell of apps' replicas and engines."""
        return self._of_apps.told

    @tells_of_apps.setter
    def tells_of_apps(self, told: bool) -> None:
        self._of_apps.told = told

    def replicas(self, by_app: Mapping[str, Mapping[str, int]]) -> None:
        """Show how many replicas of each app are wanted, granted and ready; other apps are dropped."""
        self._replicas.clear()
        for app, counts in by_app.items():
            for state, count in counts.items():
                self._replicas.labels(app, state).set(count)

    def count(self, record: RequestRecord, seconds: float) -> None:
        """Count a request that has ended."""
        app, endpoint = record.app, record.endpoint
        exemplar = {_EXEMPLAR: record.request_id[:_EXEMPLAR_CHARACTERS]}
        self.requests.labels(app, endpoint, str(record.status)).inc()
        self.latency.labels(app, endpoint).observe(seconds, exemplar)
        if record.first_token_s is not None:
            self.first_token.labels(app, endpoint).observe(record.first_token_s, exemplar)
        if record.output_token_s is not None:
            self.output_token.labels(app, endpoint).observe(record.output_token_s, exemplar)
        if record.status == CLIENT_CLOSED:
            self.cancelled.labels(app).inc()
        if record.error is not None:
            self.errors.labels(app, record.error).inc()
        for kind, tokens in (
            ("prompt", record.prompt_tokens),
            ("completion", record.completion_tokens),
            ("tokenized", record.tokenized or None),
        ):
            if tokens is not None:
                self.tokens.labels(app, kind).inc(tokens)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page in the form that a scraper's `Accept` header asks for, and the form's content type.

        Exemplars, which name one request for each bucket, are in the form of OpenMetrics only.
        """
        if "application/openmetrics-text" in accept:
            return openmetrics.generate_latest(self._registry), OPEN_METRICS
        return self.text(), TEXT
