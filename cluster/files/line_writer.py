"""Logs of JSON lines in a storage, written from a thread of their own: nobody waits for the storage.

The log NAME is the file `NAME.jsonl` where the storage can append. Elsewhere it lies in parts, the files of
the directory NAME in the order of their names; a writer only ever writes its own newest part again.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from cluster.errors import ShoalError
from cluster.files.backend import StorageError
from cluster.files.storage import Storage

PART_BYTES = 256 * 1024
"""A part that has grown so large is left as it is, and the next one begun."""
PART_PAUSE_S = 2.0
"""Least time between two writes where each is a whole part."""
RETRY_S = 2.0
MOST_UNWRITTEN = 500_000
"""Lines that wait for a storage that does not answer; the oldest of a longer row are lost, and counted."""
_MOST_AT_ONCE = 10_000


@dataclass
class _Part:
    """The part that this writer is at."""

    name: str
    number: int
    lines: list[str] = field(default_factory=list)
    size: int = 0


class LineWriter:
    """Takes lines, and writes them in their order as soon as the storage takes them.

    A line that was written, and yet reported as failed, may stand there twice.

    Args:
        storage: the directory of the logs.
        most_unwritten: lines that may wait.
        made: the directory has been made before: where it is not there, its file system is away. Else the
            first write makes it.
    """

    def __init__(self, storage: Storage, most_unwritten: int = MOST_UNWRITTEN, *, made: bool = False) -> None:
        self._storage = storage
        self._most_unwritten = most_unwritten
        self._unwritten: dict[str, deque[tuple[int, str]]] = defaultdict(deque)
        """By log, with the numbers in which they came."""
        self._taken = 0
        self._begun = 0
        self._ended = 0
        self._parts: dict[str, _Part] = {}
        self._writer = uuid.uuid4().hex[:8]
        """Part of each part's name: two writers never write one part."""
        self._was_there = made
        self._soon = False
        self._closing = False
        self._changed = threading.Condition()
        self.lost = 0
        """Lines that were given up, since too many waited."""
        self.trouble: str | None = None
        """Why nothing could be written when that was last tried; None when it could."""
        self._thread = threading.Thread(target=self._write, name="line-writer", daemon=True)
        self._thread.start()

    def add(self, log: str, lines: Iterable[Mapping[str, Any]], *, soon: bool = False) -> None:
        """Take in lines; nothing here waits.

        Args:
            soon: somebody follows; where parts are written, this one does not wait for more lines.
        """
        texts = [json.dumps(line) for line in lines]
        with self._changed:
            for text in texts:
                self._taken += 1
                self._unwritten[log].append((self._taken, text))
            while sum(map(len, self._unwritten.values())) > self._most_unwritten:
                max(self._unwritten.values(), key=len).popleft()
                self.lost += 1
            self._soon = self._soon or soon
            self._changed.notify_all()

    def unwritten(self, log: str) -> int:
        """Lines of a log that the storage does not have yet."""
        with self._changed:
            return len(self._unwritten.get(log, ()))

    def written(self, timeout_s: float, *, patient: bool = True) -> bool:
        """Wait until all that was added so far is written; whether that was so in time.

        A part is written at once then, and not after a pause.

        Args:
            patient: wait on where the storage fails, until it does not.
        """
        begun = self._begun
        # A try that had begun before tells of the storage as it was then.
        return self._wait(timeout_s, lambda: not patient and self.trouble is not None and self._ended > begun)

    def answered(self, timeout_s: float) -> bool:
        """Wait until all that was added is written, or the storage is failing; whether it is written."""
        return self._wait(timeout_s, lambda: self.trouble is not None)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, if the storage answers in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _wait(self, timeout_s: float, given_up: Callable[[], bool]) -> bool:
        """Wait until all that was added so far is written; whether it is, when nobody waits any more."""
        with self._changed:
            self._soon = True
            self._changed.notify_all()
            last = self._taken

            def done() -> bool:
                return not any(row and row[0][0] <= last for row in self._unwritten.values())

            self._changed.wait_for(lambda: done() or given_up(), timeout_s)
            return done()

    # -- the thread -------------------------------------------------------------------------------------

    def _write(self) -> None:
        with suppress(ShoalError):
            self._was_there = self._was_there or (self._storage.appendable and self._storage.exists())
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(self._unwritten.values()) or self._closing)
                batches = {
                    log: list(islice(row, _MOST_AT_ONCE)) for log, row in self._unwritten.items() if row
                }
                self._soon = False
                if not batches:
                    return
                self._begun += 1
            failed = None
            for log, batch in batches.items():
                failed = self._try(log, [text for _, text in batch])
                if failed is not None:
                    break
                self._done(self._unwritten[log], batch[-1][0])
            with self._changed:
                self.trouble = failed
                self._ended += 1
                self._changed.notify_all()
                if failed is not None:
                    if self._closing:
                        return
                    self._changed.wait_for(lambda: self._closing, RETRY_S)
                elif not self._storage.appendable:
                    self._changed.wait_for(lambda: self._closing or self._soon, PART_PAUSE_S)

    def _done(self, row: deque[tuple[int, str]], last: int) -> None:
        with self._changed:
            while row and row[0][0] <= last:
                row.popleft()

    def _try(self, log: str, lines: list[str]) -> str | None:
        """Write a batch; why it failed, or None."""
        try:
            if self._storage.appendable:
                self._append(log, lines)
            else:
                self._write_part(log, lines)
        except (ShoalError, OSError) as error:
            return str(error)
        return None

    def _append(self, log: str, lines: list[str]) -> None:
        # A directory of this name, made anew, would lie below the file system that is away now.
        if self._was_there and not self._storage.exists():
            raise StorageError(f"cannot write {self._storage.location}: it is not there any more")
        self._storage.append_lines(f"{log}.jsonl", lines)
        self._was_there = True

    def _write_part(self, log: str, lines: list[str]) -> None:
        part = self._parts.get(log)
        if part is None or part.size >= PART_BYTES:
            last = self._last_number(log) if part is None else part.number
            part = _Part(f"{log}/{last + 1:012d}-{self._writer}.jsonl", last + 1)
        whole = [*part.lines, *(f"{line}\n" for line in lines)]
        data = "".join(whole).encode()
        self._storage.write_bytes(part.name, data)
        part.lines, part.size = whole, len(data)
        self._parts[log] = part

    def _last_number(self, log: str) -> int:
        numbers = [name.partition("-")[0] for name in self._storage.list(log)]
        return max((int(number) for number in numbers if number.isdecimal()), default=0)
