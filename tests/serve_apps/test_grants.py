"""Replicas exist only under a grant: what the policy answers while the broker grants, refuses or is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from serve_apps import autoscaling
from serve_apps.autoscaling import LeaseKeeper, ServingPolicy


class Broker:
    """Grants up to `free` replicas; None is a broker that is dead."""

    def __init__(self, free: int | None) -> None:
        self.free = free
        self.asked: list[int] = []

    def __call__(self, app: str, unit: dict[str, float], least: int, want: int) -> int:
        assert (app, unit, least) == ("chat", {"CPU": 2.0}, 1)
        self.asked.append(want)
        if self.free is None:
            raise ConnectionError("the broker is dead")
        return min(want, self.free)


@dataclass
class Context:
    """The part of Serve's AutoscalingContext that the policy reads."""

    total_num_requests: float
    target_num_replicas: int


@pytest.fixture
def policy_under(monkeypatch: pytest.MonkeyPatch) -> Callable[[Broker], Callable[[float], int]]:
    """A policy under a broker, as Serve drives it: called with the load, its answer is the next target."""

    def build(broker: Broker) -> Callable[[float], int]:
        monkeypatch.setattr(autoscaling, "ask_broker", broker)
        monkeypatch.setattr(autoscaling, "HEARTBEAT_S", 0.01)
        policy: Any = ServingPolicy("chat", {"CPU": 2.0}, 1, 4, 2.0, 0.0, 0.0)
        context = Context(0.0, 1)

        def drive(ongoing: float) -> int:
            context.total_num_requests = ongoing
            context.target_num_replicas, _ = policy(context)
            return context.target_num_replicas

        return drive

    return build


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_a_want_is_carried_out_as_far_as_it_is_granted(policy_under: Any) -> None:
    broker = Broker(free=3)
    drive = policy_under(broker)
    eventually(lambda: drive(8) == 3)
    assert broker.asked[-1] == 4
    eventually(lambda: drive(0) == 1)


def test_a_grant_that_is_taken_back_takes_replicas_away_but_never_the_last(policy_under: Any) -> None:
    broker = Broker(free=4)
    drive = policy_under(broker)
    eventually(lambda: drive(8) == 4)
    broker.free = 2
    eventually(lambda: drive(8) == 2)
    broker.free = 0
    eventually(lambda: drive(8) == 1)


def test_a_dead_broker_changes_nothing(policy_under: Any) -> None:
    broker = Broker(free=2)
    drive = policy_under(broker)
    eventually(lambda: drive(8) == 2)
    broker.free = None
    asked = len(broker.asked)
    eventually(lambda: drive(8) == 2 and len(broker.asked) > asked + 2)
    assert drive(0) == 1  # Less than granted needs no broker.
    broker.free = 3
    eventually(lambda: drive(8) == 3)


def test_a_broker_that_does_not_answer_does_not_hold_up_the_policy() -> None:
    hold, asked = threading.Event(), threading.Event()

    def ask(want: int) -> int:
        asked.set()
        hold.wait(10)
        return want

    keeper = LeaseKeeper("chat", ask)
    began = time.monotonic()
    for want in (1, 2, 3):
        keeper.tell(want)
    assert time.monotonic() - began < 1
    assert asked.wait(5)
    assert keeper.granted is None
    hold.set()
    eventually(lambda: keeper.granted == 3)


def test_an_app_that_is_gone_stops_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaling, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(autoscaling, "SILENCE_S", 0.1)
    before = threading.active_count()
    keeper = LeaseKeeper("chat", lambda want: want)
    keeper.tell(1)
    eventually(lambda: keeper.granted == 1)
    eventually(lambda: threading.active_count() == before)
    keeper.tell(2)
    eventually(lambda: keeper.granted == 2)
