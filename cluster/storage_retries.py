"""Reading from an object store that is busy or far away: what fails is tried again.

The stores' own clients do so by themselves, but for one case: an error whose text is longer than the bytes
that were asked for reaches us as a broken read.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa

T = TypeVar("T")

_PAUSES_S = (0.1, 0.5, 2.0)


def patiently(read: Callable[[], T]) -> T:
    """Call something that reads, up to four times; what is not there is not asked for again."""
    for pause in _PAUSES_S:
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(pause)
    return read()


class PatientFile(io.RawIOBase):
    """A file of an object store, each read of it tried again where it fails."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file = file
        self._size: int = file.size()
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = min(len(view), max(0, self._size - self._position))
        if length == 0:
            return 0
        data = patiently(lambda: self._file.read_at(length, self._position))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
