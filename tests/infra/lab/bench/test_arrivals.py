"""Requests that are sent when they are due, whoever answers them and when."""

from __future__ import annotations

import time

import pytest

from infra.lab.bench.arrivals import Arrivals
from infra.lab.bench.asking import Asker
from tests.infra.lab.bench.test_clients import WAIT_S, Handler, serving, slow_to_end


def test_none_waits_for_an_answer_and_all_are_answered_in_the_end() -> None:
    due = [0.0, 0.05, 0.1, 0.15, 0.2, 0.6]
    waited: list[float] = []

    def meanwhile(seconds: float) -> None:
        waited.append(seconds)
        time.sleep(seconds)

    with serving(slow_to_end) as (server, url):
        load = Arrivals(Asker(url, "chat", "hi"), due)
        began, ended = load.run(meanwhile)
    assert server.most == 5
    assert ended - began == pytest.approx(0.6, abs=0.3)
    assert sum(waited) == pytest.approx(0.6, abs=0.3)
    assert sorted(answer.sent - began for answer in load.answers) == pytest.approx(due)
    assert all(answer.ended - answer.sent > WAIT_S / 2 for answer in load.answers)
    assert (load.failures, len(load.first_tokens)) == ([], 6)


def test_what_fails_is_told_and_the_others_go_on() -> None:
    def odd(handler: Handler) -> None:
        if handler.server.asked["seed"] % 2:
            handler.send_error(503)
        else:
            slow_to_end(handler)

    with serving(odd) as (_, url):
        load = Arrivals(Asker(url, "chat", "hi"), [0.0, 0.01, 0.02])
        load.run(time.sleep)
    (failed,) = load.failures
    assert failed.status == 503
    assert len(load.answers) == 2


def test_what_is_late_counts_from_when_it_was_due() -> None:
    with serving(slow_to_end) as (_, url):
        load = Arrivals(Asker(url, "chat", "hi"), [0.0, 0.1])
        began, _ = load.run(lambda seconds: time.sleep(seconds + 0.5))
    late = max(load.answers, key=lambda answer: answer.sent)
    assert late.sent == pytest.approx(began + 0.1)
    assert late.first - late.sent > 0.5
