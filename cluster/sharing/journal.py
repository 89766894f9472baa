"""The log of events: the newest in memory, all of them in a file of the storage.

What is told of the trust in nodes stands in a second log too: it is little, and counts for days, in which a
busy cluster has more events than anybody wants to read at a start.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from cluster.files.backend import StorageError
from cluster.files.line_reader import newest_first, read_lines
from cluster.files.line_writer import LineWriter
from cluster.files.storage import Storage
from cluster.files.time_limit import within
from cluster.sharing.events import Event

EVENTS = "events"
TRUST = "trust"
"""Names of the logs, as in cluster.files.line_writer."""
_OF_TRUST = ("node_blamed", "node_trusted", "broker_started")
"""The causes of what stands in the log of trust."""
KEPT = 2000
"""Events in memory, for whoever watches."""
MOST_UNWRITTEN = 20_000
"""Events that wait for a storage that does not answer; older ones are lost to the file, not the sequence."""
READ_TIMEOUT_S = 5.0
"""How long the end of a log may take to read when the broker starts."""


class Journal:
    """Numbers the events, keeps the newest, and has all of them written.

    Numbers go on where the last journal in this storage ended; `epoch` is greater in every journal, so that
    (epoch, seq) is in order even where the end of the file was lost with the broker that should have written
    it. Nothing here waits for the storage, and one that fails is tried again.

    Args:
        storage: the directory of the logs.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._clock = clock
        before: list[dict[str, Any]] = within(READ_TIMEOUT_S, lambda: _newest(storage), otherwise=[])
        last = before[-1] if before else {}
        self.epoch = max(int(clock()), int(last.get("epoch", 0)) + 1)
        self._seq = int(last.get("seq", 0))
        self._kept: deque[dict[str, Any]] = deque(before, maxlen=KEPT)
        self._numbering = threading.Lock()
        self._writer = LineWriter(storage, MOST_UNWRITTEN)

    @property
    def trouble(self) -> str | None:
        """Why the log could not be written when that was last tried; None when it could."""
        return self._writer.trouble

    def add(self, events: Iterable[Event]) -> None:
        """Take in events of this moment."""
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        with self._numbering:
            lines = []
            for event in events:
                self._seq += 1
                lines.append({"seq": self._seq, "epoch": self.epoch, "time": now, **event.as_json()})
            self._kept.extend(lines)
            self._writer.add(EVENTS, lines)
            self._writer.add(TRUST, [line for line in lines if line["cause"] in _OF_TRUST])

    def of_trust(
        self, which: Callable[[Iterator[dict[str, Any]]], Iterable[Mapping[str, Any]]]
    ) -> list[Mapping[str, Any]]:
        """What was written of the trust in nodes, the oldest first.

        Args:
            which: picks what counts out of all of it, the newest first, and reads no further than it must.
                Where the storage fails, or takes too long, what was read by then is returned.
        """
        found: list[Mapping[str, Any]] = []

        def read() -> None:
            for line in which(filter(_is_event, newest_first(self._storage, TRUST))):
                found.append(line)

        within(READ_TIMEOUT_S, read, otherwise=None)
        return found[::-1]

    def after(self, place: tuple[int, int] | None, most: int = KEPT) -> list[dict[str, Any]]:
        """The first events after (epoch, seq) that are still kept; with None, the newest."""
        with self._numbering:
            kept = list(self._kept)
        if place is None:
            return kept[-most:] if most else []
        return [line for line in kept if (line["epoch"], line["seq"]) > place][:most]

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, if the storage answers in time."""
        self._writer.close(timeout_s)

    def flushed(self, timeout_s: float = 5.0) -> bool:
        """Wait until all that was added is written; whether that was so in time."""
        return self._writer.written(timeout_s)


def journal_storage(location: str, cluster: str) -> Storage:
    """The directory of a cluster's log in the cluster's storage."""
    return Storage(location).child("sharing", cluster)


def read_events(storage: Storage) -> list[dict[str, Any]]:
    """All events of a log, in order; what was cut off or damaged is left out.

    Raises:
        StorageError: the storage cannot be read.
    """
    return _in_order(read_lines(storage, EVENTS))


def _newest(storage: Storage) -> list[dict[str, Any]]:
    """The last events of a log; those that can be read, which are no reason not to start."""
    found: list[dict[str, Any]] = []
    with suppress(StorageError):
        for line in islice(filter(_is_event, newest_first(storage, EVENTS)), KEPT):
            found.append(line)
    return _in_order(found)


def _in_order(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    # A batch that was written, and yet reported as failed, is there again in the next one.
    found = {(line["epoch"], line["seq"]): line for line in lines if _is_event(line)}
    return [found[place] for place in sorted(found)]


def _is_event(line: Mapping[str, Any]) -> bool:
    return {"seq", "epoch", "cause"} <= line.keys()
