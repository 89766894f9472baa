"""`shoal status --watch`: every event once and in order, whatever happens to the broker."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cluster.errors import ShoalError
from infra.cli.watch import event_line, follow, leases_table


def event(seq: int, epoch: int = 1) -> dict[str, Any]:
    return {"epoch": epoch, "seq": seq, "time": "2026-01-02T03:04:05.678+00:00", "reason": f"event {seq}"}


class Broker:
    """Events come between two looks; a look may fail."""

    def __init__(self, *looks: list[dict[str, Any]] | None) -> None:
        self.known: list[dict[str, Any]] = []
        self.looks = list(looks)

    def events(self, after: tuple[int, int] | None = None, most: int = 1000) -> list[dict[str, Any]]:
        if after is None:
            return self.known[-most:]
        if self.looks:
            new = self.looks.pop(0)
            if new is None:
                raise ShoalError("the broker did not answer")
            self.known += new
        return [line for line in self.known if (line["epoch"], line["seq"]) > after][:most]

    def leases(self) -> list[dict[str, Any]]:
        return []


class Shown:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def event(self, event: Any) -> None:
        self.seen.append((event["epoch"], event["seq"]))

    def leases(self, rows: Any) -> None: ...

    def close(self) -> None: ...


def watched(broker: Broker, shown_at_first: int = 0) -> list[tuple[int, int]]:
    shown = Shown()
    follow(broker, shown, shown_at_first, lambda: not broker.looks)
    return shown.seen


def test_each_event_is_shown_once_in_order_also_over_a_restart_of_the_broker() -> None:
    broker = Broker([event(1)], [], [event(2), event(3)], [event(3, epoch=2), event(4, epoch=2)])
    assert watched(broker) == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4)]


def test_only_the_last_of_the_past_are_shown_or_none() -> None:
    for most, first in ((2, [(1, 4), (1, 5)]), (0, [])):
        broker = Broker([event(6)])
        broker.known = [event(seq) for seq in range(1, 6)]
        assert watched(broker, most) == [*first, (1, 6)]


def test_a_broker_that_does_not_answer_is_said_once_and_asked_again(capsys: pytest.CaptureFixture) -> None:
    broker = Broker([event(1)], None, None, [event(2)])
    assert watched(broker) == [(1, 1), (1, 2)]
    assert capsys.readouterr().err.splitlines()[1:] == ["the broker did not answer; asking again"]


def test_a_line_has_the_time_here_and_the_reason() -> None:
    assert re.fullmatch(r"\d\d:\d\d:05 event 7", event_line(event(7)))


def test_the_table_has_a_row_a_lease() -> None:
    row = {"holder": "job/a", "kind": "training", "min": 1, "max": 2, "granted": 1, "wants": 2, "nodes": []}
    assert leases_table([row, row]).row_count == 2
