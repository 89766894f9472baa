"""A pod that has to go."""

from __future__ import annotations

import threading
import time

import pytest

from cluster.config.sections.cluster import ClusterConfig
from cluster.errors import ShoalError
from infra.kubernetes_pod import MARGIN_S, worker

SECONDS = 3.0
"""To leave, which is all of the notice but its margin."""
CLUSTER = ClusterConfig.model_validate(
    {
        "name": "lab",
        "provider": "kubernetes",
        "nodes": [{"name": "head"}],
        "storage": "/data",
        "kubernetes": {"image": "shoal", "storage_claim": "data", "notice_s": int(MARGIN_S + SECONDS)},
    }
)


class FakeRay:
    """Somebody runs on its node for so many seconds after the first notice."""

    def __init__(self, stays_s: float, *, answers: bool = True) -> None:
        self._stays_s, self._answers = stays_s, answers
        self.is_over, self.ended_s = False, 0.0
        self.deadlines: list[float | None] = []
        self._told = time.monotonic()

    def start(self) -> None: ...

    def drain(self, seconds: float | None) -> str:
        self.deadlines.append(seconds)
        if not self._answers:
            raise ShoalError("this node cannot be drained: no answer")
        return "a node"

    def is_left(self, node: str) -> bool:
        assert node == "a node"
        return time.monotonic() - self._told > self._stays_s

    def end(self) -> None:
        self.is_over, self.ended_s = True, time.monotonic() - self._told


def run(ray: FakeRay) -> None:
    noticed = threading.Event()
    noticed.set()
    assert worker(ray, CLUSTER, noticed) == 0  # type: ignore[arg-type]
    assert ray.is_over


def test_replicas_are_not_hurried_while_there_is_time() -> None:
    """Serve stops those of a node with a deadline at once, if a request of theirs may take longer."""
    ray = FakeRay(stays_s=0.5)
    run(ray)
    assert ray.deadlines == [None]
    assert ray.ended_s < SECONDS


def test_the_last_third_is_for_their_requests_to_finish() -> None:
    ray = FakeRay(stays_s=60)
    run(ray)
    first, second = ray.deadlines
    assert first is None
    assert second is not None
    assert 0 < second <= SECONDS / 3
    assert SECONDS <= ray.ended_s < SECONDS + 2


def test_a_head_that_does_not_answer_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    ray = FakeRay(stays_s=60, answers=False)
    run(ray)
    assert ray.ended_s < SECONDS
    assert "cannot be drained" in capsys.readouterr().err
