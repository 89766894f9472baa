"""What was seen of a load on a cluster that is divided in one of the ways that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.lab.bench.asking import FailedRequest, TimedAnswer
from infra.lab.bench.load_course import Logs, Round

DEVICE = "CPU"
"""What is shared here, in Ray's names; a worker and a replica take one each."""

SHARING, FIXED, RAY = "sharing", "fixed", "ray"
CALLED = {SHARING: "sharing", FIXED: "fixed split", RAY: "Ray's own"}
"""What is compared, and what it is called."""


@dataclass(frozen=True)
class Side:
    """What was seen of the load on one way to divide the cluster.

    Attributes:
        span: what is counted, from and to, in Unix time.
        rounds: of the load, where it came in rounds.
        rates: samples a second without a load, by workers; empty where that was not measured.
        answers, failures: of the load.
        first_tokens: when a request had its first token, and of which replica.
        serving_s: device-seconds of replicas, where nobody has a lease; what steps is all that trains then.
    """

    span: tuple[float, float]
    logs: Logs
    rates: Mapping[int, float]
    answers: Sequence[TimedAnswer]
    failures: Sequence[FailedRequest]
    first_tokens: Sequence[tuple[float, str]]
    rounds: Sequence[Round] = ()
    serving_s: float | None = None
