"""A deployment has as many replicas as the controller says, also while that is silent or gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from serve_apps.controller import size_policy
from serve_apps.controller.size_policy import ControlledSize, SizeKeeper


@dataclass
class Context:
    """The part of Serve's AutoscalingContext that the policy reads."""

    target_num_replicas: int


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_policy, "ASK_EVERY_S", 0.01)


def test_what_the_controller_says_is_done_and_its_silence_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[int | Exception | None] = [None]
    asked: list[tuple[str, int]] = []

    def ask(self: ControlledSize, has: int) -> int | None:
        asked.append((self._application, has))
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    monkeypatch.setattr(ControlledSize, "_ask", ask)
    policy = ControlledSize("chat:1")

    def drive(context: Context) -> int:
        size, _ = policy(context)
        return size

    # It does not know the application (yet): Serve's own target stays.
    assert drive(Context(2)) == 2
    eventually(lambda: drive(Context(2)) == 2 and len(asked) > 2)
    answers[0] = 4
    eventually(lambda: drive(Context(2)) == 4)
    answers[0] = ConnectionError("the controller is dead")
    known = len(asked)
    eventually(lambda: drive(Context(4)) == 4 and len(asked) > known + 2)
    assert asked[0] == ("chat:1", 2)
    assert asked[-1] == ("chat:1", 4)
    answers[0] = 0
    eventually(lambda: drive(Context(4)) == 0)


def test_a_controller_that_does_not_answer_does_not_hold_up_the_policy() -> None:
    hold, asked = threading.Event(), threading.Event()

    def ask(has: int) -> int:
        asked.set()
        hold.wait(10)
        return 3

    keeper = SizeKeeper("chat:1", ask)
    began = time.monotonic()
    for _ in range(3):
        keeper.keep(1)
    assert time.monotonic() - began < 1
    assert asked.wait(5)
    assert keeper.size is None
    hold.set()
    eventually(lambda: keeper.size == 3)


def test_an_application_that_is_gone_stops_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_policy, "SILENCE_S", 0.1)
    answers: list[Any] = [1]
    keeper = SizeKeeper("gone:1", lambda has: answers[0])
    keeper.keep(1)
    eventually(lambda: keeper.size == 1)
    eventually(lambda: all("gone:1" not in thread.name for thread in threading.enumerate()))
    answers[0] = 2
    keeper.keep(1)
    eventually(lambda: keeper.size == 2)
