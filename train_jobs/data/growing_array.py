"""An array that fits neither into memory nor on a disk of ours: in a storage, in pieces until it is whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cluster.files.storage import Storage

ARRAY = ".npy"
_PIECE_BYTES = 32 << 20
_READ_AT_ONCE = 4


class GrowingArray:
    """An array of one dimension that is written as it grows: each piece is a file, named after its first
    element. At the end they are put together.

    Attributes:
        length: how many elements it has.

    Args:
        staged: where its pieces are, in a directory of its name.
        kind: of an element.
    """

    def __init__(self, staged: Storage, name: str, kind: np.dtype[Any]) -> None:
        self._directory = staged.child(name)
        self._name = name
        self._kind = kind
        self.length = 0
        self._unwritten = bytearray()

    def open(self, length: int) -> bool:
        """Go on behind so many elements; whether they are there. What is behind them is deleted."""
        self._unwritten.clear()
        self.length = 0
        for first, count in self._found():
            if first >= length:
                self._directory.delete(_piece(first))
            elif first == self.length and first + count <= length:
                self.length += count
            elif first == self.length:
                whole = self._directory.read_bytes(_piece(first))
                self._unwritten += whole[: (length - first) * self._kind.itemsize]
                self.length = length
        return self.length == length

    def add(self, elements: np.ndarray) -> None:
        self._unwritten += elements.astype(self._kind, copy=False).tobytes()
        self.length += len(elements)
        if len(self._unwritten) >= _PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was added; none of it is added to."""
        if self._unwritten:
            first = self.length - len(self._unwritten) // self._kind.itemsize
            self._directory.write_bytes(_piece(first), bytes(self._unwritten))
            self._unwritten.clear()

    def has(self, length: int) -> bool:
        """Whether the pieces have so many elements, and no more."""
        end = 0
        for first, count in self._found():
            if first != end:
                return False
            end += count
        return end == length

    def put_together(self, place: Storage, length: int) -> str:
        """Write the array; returns a digest of its elements."""
        digest = hashlib.blake2b(digest_size=16)
        with place.writer(f"{self._name}{ARRAY}") as file:
            described = {"descr": self._kind.str, "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, described)
            for data in self._read():
                file.write(data)
                digest.update(data)
            file.flush()
            if place.appendable:
                os.fsync(file.fileno())  # what vouches for it must not outlive it
        return digest.hexdigest()

    def _found(self) -> list[tuple[int, int]]:
        """The first element of each piece, and how many it has."""
        entries = self._directory.entries()
        return [(int(each.name), each.size_bytes // self._kind.itemsize) for each in entries]

    def _read(self) -> Iterator[bytes]:
        """The pieces in their order, some of them read at once."""
        names = self._directory.list()
        with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
            for first in range(0, len(names), _READ_AT_ONCE):
                yield from threads.map(self._directory.read_bytes, names[first : first + _READ_AT_ONCE])


def length_of(place: Storage, name: str) -> int:
    """How many elements an array has that was put together."""
    with place.reader(f"{name}{ARRAY}") as file:
        np.lib.format.read_magic(file)
        (length,), _, _ = np.lib.format.read_array_header_1_0(file)
    return int(length)


def _piece(first: int) -> str:
    """The name of the piece that begins with an element; by name they are in their order."""
    return f"{first:015d}"
