"""What the first node of a batch job hears of the others, and that it misses one that has gone without a
word."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import pytest

from cluster.hosts.slurm import node_step
from cluster.hosts.slurm.node_step import NodeStep

UP = {"node": "n2", "state": "up", "told": {}, "said": "", "step": "3"}
LIVES = {"node": "n2", "state": "lives"}
NOTICE = {"node": "n2", "state": "notice"}


def step_that(
    *says: object, then: str = "time.sleep(60)", notice: Callable[[], None] = lambda: None
) -> NodeStep:
    lines = "\n".join(f"print({json.dumps(json.dumps(each))}, flush=True)" for each in says)
    return NodeStep([sys.executable, "-c", f"import time\n{lines}\n{then}"], lambda text: None, notice)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_says_that_it_lives_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_step, "SILENT_S", 1.0)
    living = f"while True:\n    print('{json.dumps(LIVES)}', flush=True)\n    time.sleep(0.1)"
    step = step_that(UP, then=living)
    step.start()
    until(lambda: step.is_up)
    time.sleep(1.5)
    assert step.is_up
    assert not step.is_silent(time.monotonic())
    step.give_up()


def test_one_that_says_nothing_any_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_step, "SILENT_S", 0.5)
    step = step_that(UP)
    step.start()
    until(lambda: step.is_up)
    until(lambda: step.is_silent(time.monotonic()))
    assert step.give_up() == "3"
    assert step.is_over
    assert not step.is_silent(time.monotonic())


def test_one_that_has_not_come_up_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_step, "SILENT_S", 0.1)
    step = step_that()
    step.start()
    time.sleep(0.3)
    assert not step.is_silent(time.monotonic())
    step.give_up()


def test_one_that_is_told_to_leave_says_so_and_is_what_it_was() -> None:
    noticed: list[bool] = []
    step = step_that(UP, NOTICE, notice=lambda: noticed.append(step.is_up))
    step.start()
    until(lambda: bool(noticed))
    assert noticed == [True]
    step.give_up()
