"""Logs of JSON lines in a storage, read from where one was: what cluster.files.line_writer wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from cluster.files.backend import MissingError
from cluster.files.storage import Storage

_BLOCK_BYTES = 1 << 20
"""So much of a file is read at a time where it is read from its end on."""


class LineReader:
    """The lines that a log gains, each once.

    A line that a crash cut off is left out, and one that is being written is waited for.

    Args:
        storage: the directory of the log.
    """

    def __init__(self, storage: Storage, log: str) -> None:
        self._storage = storage
        self._log = log
        self._read = 0
        """Bytes of the file, to the end of its last whole line."""
        self._parts: dict[str, tuple[int, int]] = {}
        """Size of each part when it was read, and its lines."""

    def new(self) -> list[dict[str, Any]]:
        """The lines since the last call; all of them at first.

        Raises:
            StorageError: the storage cannot be read; what was read of it counts the next time.
        """
        lines: list[bytes] = []
        # Logs of older versions are files in an object store too: looked for before there are parts.
        if self._storage.appendable or not self._parts:
            lines += self._of_file()
        read = self._read + sum(len(line) + 1 for line in lines)
        parts = {} if self._storage.appendable else self._of_parts(lines)
        self._read, self._parts = read, {**self._parts, **parts}
        return list(documents(lines))

    def _of_file(self) -> list[bytes]:
        try:
            data = self._storage.read_bytes(f"{self._log}.jsonl", self._read)
        except MissingError:
            return []
        return data.split(b"\n")[:-1]

    def _of_parts(self, lines: list[bytes]) -> dict[str, tuple[int, int]]:
        """Read what the parts have gained; returns which parts, as in `_parts`."""
        read = {}
        for entry in self._storage.entries(self._log):
            size, before = self._parts.get(entry.name, (0, 0))
            if entry.size_bytes != size:
                found = self._storage.read_bytes(f"{self._log}/{entry.name}").split(b"\n")[:-1]
                lines += found[before:]
                read[entry.name] = (entry.size_bytes, len(found))
        return read


def read_lines(storage: Storage, log: str) -> list[dict[str, Any]]:
    """All lines of a log, in the order of writing.

    Raises:
        StorageError: the storage cannot be read.
    """
    return LineReader(storage, log).new()


def newest_first(storage: Storage, log: str) -> Iterator[dict[str, Any]]:
    """The lines of a log from its end on; a piece of it is read at a time, and no more than is asked for.

    What an older version wrote whole is left out where the log lies in parts.

    Raises:
        StorageError: while it is gone through, the storage cannot be read.
    """
    for lines in _blocks_of_file(storage, log) if storage.appendable else _parts(storage, log):
        yield from documents(reversed(lines))


def _blocks_of_file(storage: Storage, log: str) -> Iterator[list[bytes]]:
    """The lines of each block of the file, the last block first."""
    try:
        with storage.reader(f"{log}.jsonl") as file:
            end = file.seek(0, os.SEEK_END)
            beginning = b""  # of the block that was read before: the end of a line
            while end:
                start = max(0, end - _BLOCK_BYTES)
                file.seek(start)
                beginning, *lines = (file.read(end - start) + beginning).split(b"\n")
                yield lines
                end = start
            yield [beginning]
    except MissingError:
        return


def _parts(storage: Storage, log: str) -> Iterator[list[bytes]]:
    """The lines of each part, the last part first."""
    for name in reversed(storage.list(log)):
        yield storage.read_bytes(f"{log}/{name}").split(b"\n")


def documents(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """What the lines say; one that is no JSON object is left out."""
    for line in lines:
        try:
            document = json.loads(line)
        except ValueError:  # a crash or a full disk cut it off
            continue
        if isinstance(document, dict):
            yield document
