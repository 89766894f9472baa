"""`shoal status --watch`: every event once and in order, whatever happens to the broker."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from cluster.errors import ShoalError
from infra.api.event_stream import EventPlace, event_stream
from infra.cli.watch import event_line, leases_table


def event(seq: int, epoch: int = 1) -> dict[str, Any]:
    return {"epoch": epoch, "seq": seq, "time": "2026-01-02T03:04:05.678+00:00", "reason": f"event {seq}"}


class Broker:
    """Events come between two looks; a look may fail."""

    def __init__(self, *looks: list[dict[str, Any]] | None) -> None:
        self.known: list[dict[str, Any]] = []
        self.looks = list(looks)
        self.last = next(
            (line["epoch"], line["seq"]) for look in reversed(looks) for line in (look or [])[::-1]
        )

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


def watched(broker: Broker, first: int = 0, after: str | None = None) -> tuple[list[EventPlace], list[str]]:
    """The places of the events that a stream tells, and its notes, until the broker has no more looks."""
    places: list[EventPlace] = []
    notes: list[str] = []

    async def read() -> None:
        async for told in event_stream(broker, after, first, look_every_s=0.0):
            if told.event == "event":
                places.append((told.data["epoch"], told.data["seq"]))
                assert told.id == "{}.{}".format(*places[-1])
            elif told.event == "note":
                notes.append(told.data["text"])
            if not broker.looks and places and places[-1] == broker.last:
                return

    asyncio.run(read())
    return places, notes


def test_each_event_is_shown_once_in_order_also_over_a_restart_of_the_broker() -> None:
    broker = Broker([event(1)], [], [event(2), event(3)], [event(3, epoch=2), event(4, epoch=2)])
    assert watched(broker)[0] == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4)]


def test_only_the_last_of_the_past_are_shown_or_none() -> None:
    for most, first in ((2, [(1, 4), (1, 5)]), (0, [])):
        broker = Broker([event(6)])
        broker.known = [event(seq) for seq in range(1, 6)]
        assert watched(broker, most)[0] == [*first, (1, 6)]


def test_whoever_was_cut_off_goes_on_from_what_it_has_seen() -> None:
    broker = Broker([event(6)])
    broker.known = [event(seq) for seq in range(1, 6)]
    assert watched(broker, after="1.3")[0] == [(1, 4), (1, 5), (1, 6)]


def test_a_broker_that_does_not_answer_is_said_once_and_asked_again() -> None:
    broker = Broker([event(1)], None, None, [event(2)])
    assert watched(broker) == ([(1, 1), (1, 2)], ["the broker did not answer; asking again"])


def test_a_line_has_the_time_here_and_the_reason() -> None:
    assert re.fullmatch(r"\d\d:\d\d:05 event 7", event_line(event(7)))


def test_the_table_has_a_row_a_lease() -> None:
    row = {"holder": "job/a", "kind": "training", "min": 1, "max": 2, "granted": 1, "wants": 2, "nodes": []}
    assert leases_table([row, row]).row_count == 2
