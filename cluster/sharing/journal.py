"""The log of events: the newest in memory, all of them in a file of the storage."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from cluster.errors import ShoalError
from cluster.sharing.events import Event
from cluster.storage import Storage

EVENTS_FILE = "events.jsonl"
"""Where the storage can append; elsewhere every batch is a file of its own in the directory PARTS."""
PARTS = "events"
KEPT = 2000
"""Events in memory, for whoever watches."""
MOST_UNWRITTEN = 20_000
"""Events that wait for a storage that does not answer; older ones are lost to the file, not the sequence."""
RETRY_S = 2.0
BATCH_S = 2.0
"""Least time between two files where every batch is one."""
READ_TIMEOUT_S = 5.0
"""How long the end of the log may take to read when the broker starts."""
_TAIL_BYTES = 256 * 1024


class Journal:
    """Numbers the events, keeps the newest, and writes all of them from a thread of its own.

    Numbers go on where the last journal in this storage ended; `epoch` is greater in every journal, so that
    (epoch, seq) is in order even where the end of the file was lost with the broker that should have written
    it. Nothing here waits for the storage, and one that fails is tried again.

    Args:
        storage: the directory of the log.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._clock = clock
        before = _in_time(lambda: _newest(storage))
        last = before[-1] if before else {}
        self.epoch = max(int(clock()), int(last.get("epoch", 0)) + 1)
        self._seq = int(last.get("seq", 0))
        self._kept: deque[dict[str, Any]] = deque(before, maxlen=KEPT)
        self._unwritten: deque[dict[str, Any]] = deque(maxlen=MOST_UNWRITTEN)
        self._changed = threading.Condition()
        self._closing = False
        self._writing = False
        self.trouble: str | None = None
        """Why the file could not be written when that was last tried; None when it could."""
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def add(self, events: Iterable[Event]) -> None:
        """Take in events of this moment."""
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        with self._changed:
            for event in events:
                self._seq += 1
                line = {"seq": self._seq, "epoch": self.epoch, "time": now, **event.as_json()}
                self._kept.append(line)
                self._unwritten.append(line)
            self._changed.notify_all()

    def after(self, place: tuple[int, int] | None, most: int = KEPT) -> list[dict[str, Any]]:
        """The first events after (epoch, seq) that are still kept; with None, the newest."""
        with self._changed:
            kept = list(self._kept)
        if place is None:
            return kept[-most:] if most else []
        return [line for line in kept if (line["epoch"], line["seq"]) > place][:most]

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, if the storage answers in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def flushed(self, timeout_s: float = 5.0) -> bool:
        """Wait until all that was added is written; whether that was so in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unwritten and not self._writing, timeout_s)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unwritten or self._closing)
                if not self._unwritten:
                    return
                batch = list(self._unwritten)
                self._writing = True
            failed = self._try(batch)
            with self._changed:
                self.trouble = failed
                self._writing = False
                if failed is None:
                    last = batch[-1]["seq"]
                    while self._unwritten and self._unwritten[0]["seq"] <= last:
                        self._unwritten.popleft()
                    self._changed.notify_all()
                elif self._closing:
                    return
                pause = RETRY_S if failed else 0.0 if self._storage.appendable else BATCH_S
                if pause:
                    self._changed.wait_for(lambda: self._closing, pause)

    def _try(self, batch: list[dict[str, Any]]) -> str | None:
        """Write a batch; why it failed, or None."""
        lines = [json.dumps(line) for line in batch]
        try:
            if self._storage.appendable:
                self._storage.append_lines(EVENTS_FILE, lines)
            else:
                name = f"{PARTS}/{self.epoch:012d}-{batch[0]['seq']:012d}.jsonl"
                self._storage.write_bytes(name, "".join(f"{line}\n" for line in lines).encode())
        except (ShoalError, OSError) as error:
            return str(error)
        return None


def _in_time(read: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What a storage says, and nothing when that takes too long."""
    found: list[list[dict[str, Any]]] = []
    thread = threading.Thread(target=lambda: found.append(read()), daemon=True)
    thread.start()
    thread.join(READ_TIMEOUT_S)
    return found[0] if found else []


def journal_storage(location: str, cluster: str) -> Storage:
    """The directory of a cluster's log in the cluster's storage."""
    return Storage(location).child("sharing", cluster)


def read_events(storage: Storage) -> list[dict[str, Any]]:
    """All events of a log, in order; what was cut off or damaged is left out.

    Raises:
        StorageError: the storage cannot be read.
    """
    files = [EVENTS_FILE] if storage.exists(EVENTS_FILE) else []
    if not storage.appendable and storage.exists(PARTS):
        files = [f"{PARTS}/{name}" for name in sorted(storage.list(PARTS))]
    # A batch that was written, and yet reported as failed, is there again in the next one.
    lines = (line for file in files for line in _events(storage.read_bytes(file)))
    found = {(line["epoch"], line["seq"]): line for line in lines}
    return [found[place] for place in sorted(found)]


def _newest(storage: Storage) -> list[dict[str, Any]]:
    """The last events of a log; none where it cannot be read, which is no reason not to start."""
    try:
        path = storage.local_path(EVENTS_FILE)
        if path is None:
            names = sorted(storage.list(PARTS)) if storage.exists(PARTS) else []
            return _events(storage.read_bytes(f"{PARTS}/{names[-1]}")) if names else []
        if not path.exists():
            return []
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read()
        return _events(data if size <= _TAIL_BYTES else data.partition(b"\n")[2])[-KEPT:]
    except (ShoalError, OSError):
        return []


def _events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # a crash or a full disk cut it off
            continue
        if isinstance(event, Mapping) and {"seq", "epoch", "cause"} <= event.keys():
            found.append(dict(event))
    return found
