"""`status --watch`: events of the broker as they happen, under a live table of the leases on a terminal."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from cluster.errors import ShoalError
from infra.cli.common import say

if TYPE_CHECKING:
    from rich.table import Table

    from cluster.state.record import ClusterRecord

POLL_S = 0.5
SHOWN_AT_FIRST = 10
"""Past events that a person is shown at the start."""

Place = tuple[int, int]


class EventSource(Protocol):
    """What is asked of the broker."""

    def events(self, after: Place | None = None, most: int = 1000) -> list[dict[str, Any]]: ...

    def leases(self) -> list[dict[str, Any]]: ...


class Show(Protocol):
    """Where events and leases go."""

    def event(self, event: Mapping[str, Any]) -> None: ...

    def leases(self, rows: list[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


def watch(record: ClusterRecord, as_json: bool) -> None:
    """Show events until Ctrl-C.

    Raises:
        ShoalError: the cluster cannot be reached.
    """
    from cluster.state.connection import connect, disconnect

    show: Show | None = None
    try:
        connect(record)
        from cluster.sharing.client import BrokerClient

        broker, pause = BrokerClient(), threading.Event()
        show = JsonLines() if as_json else LiveTable() if sys.stdout.isatty() else Lines()
        follow(broker, show, 0 if as_json else SHOWN_AT_FIRST, lambda: pause.wait(POLL_S))
    except KeyboardInterrupt:
        pass  # how a watch ends
    finally:
        if show is not None:
            show.close()
        disconnect()


def follow(source: EventSource, show: Show, shown_at_first: int, wait: Callable[[], bool]) -> None:
    """Show the last events, and then each new one once, in order, until `wait` is true.

    A broker that does not answer is said once, and asked again.
    """
    past = source.events(most=max(1, shown_at_first))
    for event in past[-shown_at_first:] if shown_at_first else []:
        show.event(event)
    place = place_of(past[-1]) if past else (0, 0)
    say("watching; Ctrl-C ends this")
    away = stopping = False
    while not stopping:
        try:
            for event in source.events(after=place):
                show.event(event)
                place = place_of(event)
            show.leases(source.leases())
            away = False
        except ShoalError as error:
            if not away:
                say(f"{error}; asking again")
            away = True
        stopping = wait()


def place_of(event: Mapping[str, Any]) -> Place:
    """Where an event stands in the order of all."""
    return event["epoch"], event["seq"]


def event_line(event: Mapping[str, Any]) -> str:
    """An event for people: the time here, and what happened."""
    time = datetime.fromisoformat(event["time"]).astimezone()
    return f"{time:%H:%M:%S} {event['reason']}"


class JsonLines:
    """One JSON document an event on standard output."""

    def event(self, event: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    def leases(self, rows: list[dict[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """One line an event on standard output."""

    def event(self, event: Mapping[str, Any]) -> None:
        print(event_line(event), flush=True)

    def leases(self, rows: list[dict[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass


class LiveTable:
    """Events above, the leases below, on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def event(self, event: Mapping[str, Any]) -> None:
        self._console.print(event_line(event), markup=False, soft_wrap=True)

    def leases(self, rows: list[dict[str, Any]]) -> None:
        self._live.update(leases_table(rows), refresh=True)

    def close(self) -> None:
        self._live.stop()


def leases_table(rows: list[dict[str, Any]]) -> Table:
    """Who has how many of what it wants."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="leases", title_justify="left", title_style="bold")
    columns = ("holder", "kind", "min", "max", "granted", "wants")
    for column in columns:
        table.add_column(column, no_wrap=column == "holder")
    for row in rows:
        table.add_row(*(Text(str(row[column])) for column in columns))
    return table
