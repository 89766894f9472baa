"""What changes hands and why, as a stream: each event once and in order, whatever happens to the broker."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, Protocol

import anyio
from fastapi.sse import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from cluster.errors import RequestError, ShoalError

LOOK_EVERY_S = 0.5
MOST_EVENTS = 10_000
PLACE = r"^\d{1,12}\.\d{1,12}$"
"""EPOCH.SEQ of an event."""

EventPlace = tuple[int, int]


class EventSource(Protocol):
    """What is asked of the broker."""

    def events(self, after: EventPlace | None = None, most: int = 1000) -> list[dict[str, Any]]: ...

    def leases(self) -> list[dict[str, Any]]: ...


async def event_stream(
    source: EventSource, after: str | None, first: int, *, look_every_s: float = LOOK_EVERY_S
) -> AsyncIterator[ServerSentEvent]:
    """`event`, with its place as id, and `leases` when they have changed; of a silent broker one
    `note`, and it is asked again.

    Args:
        after: the place that is known; None for the end of what has happened.
        first: so many events before that, too.
    """
    place, leases, noted = place_of(after), None, ""
    while True:
        try:
            if place is None:
                past = await run_in_threadpool(source.events, None, max(1, first))
                found = past[-first:] if first else []
                start = _of(past[-1]) if past else (0, 0)
            else:
                found = await run_in_threadpool(source.events, place, MOST_EVENTS)
                start = place
            now = await run_in_threadpool(source.leases)
        except ShoalError as error:
            if str(error) != noted:
                noted = str(error)
                yield ServerSentEvent(event="note", data={"text": f"{error}; asking again"})
            await anyio.sleep(look_every_s)
            continue
        place, noted = start, ""
        for event in found:
            place = _of(event)
            yield ServerSentEvent(event="event", id=f"{place[0]}.{place[1]}", data=event)
        if now != leases:
            leases = now
            yield ServerSentEvent(event="leases", data=leases)
        await anyio.sleep(look_every_s)


def place_of(text: str | None) -> EventPlace | None:
    """A place that was written before.

    Raises:
        RequestError: it is none.
    """
    if text is None:
        return None
    if not re.fullmatch(PLACE, text, re.ASCII):
        raise RequestError(f"{text[:40]!r} is no place among the events: EPOCH.SEQ is one")
    epoch, _, seq = text.partition(".")
    return int(epoch), int(seq)


def _of(event: dict[str, Any]) -> EventPlace:
    return event["epoch"], event["seq"]
