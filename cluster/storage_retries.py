"""Reading from a storage that is busy, far away, or away for a moment: what may pass is tried again.

Object stores' own clients do so by themselves, but for one case: an error whose text is longer than the bytes
that were asked for reaches us as a broken read. A mounted file system hands on what its server or its cable
does, and a handle that has gone stale stays so: the file has to be opened anew.
"""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

T = TypeVar("T")

_PAUSES_S = (0.1, 0.5, 2.0)

_OF_A_MOUNT = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.EREMOTEIO,
        errno.EAGAIN,
        errno.EBUSY,
        errno.ETIMEDOUT,
        errno.ENOTCONN,  # a FUSE file system whose process is gone
        errno.ENODEV,
        errno.ENXIO,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ESHUTDOWN,
    }
)
"""Errors of a mounted disk that tell of it, or of the way to it, and not of what was asked for."""


def patiently(read: Callable[[], T], *, local: bool = False) -> T:
    """Call something that reads, up to four times; an answer that is clear is not asked for again.

    Args:
        local: it reads a local or mounted file system, most of whose errors are clear.
    """
    for pause in _PAUSES_S:
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError as error:
            if local and error.errno not in _OF_A_MOUNT:
                raise
            time.sleep(pause)
    return read()


class _Positioned(io.RawIOBase):
    """A file that is read from anywhere; where it stands it knows itself, not its handle."""

    _position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position


class PatientFile(_Positioned):
    """A file of an object store, each read of it tried again where it fails."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file = file
        self._size: int = file.size()

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


class PatientLocalFile(_Positioned):
    """A file of a mounted disk, each read of it tried again where it fails, from a handle of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = patiently(self._opened, local=True)

    def _opened(self) -> io.FileIO:
        return io.FileIO(self._path)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_END:
            self._position = max(0, offset + (self._position if whence == io.SEEK_CUR else 0))
        else:
            self._position = patiently(lambda: self._fresh().seek(offset, whence), local=True)
        return self._position

    def readinto(self, buffer: Any) -> int:
        read = patiently(lambda: self._read_into(buffer), local=True)
        self._position += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()

    def _read_into(self, buffer: Any) -> int:
        file = self._fresh()
        try:
            file.seek(self._position)
            return file.readinto(buffer) or 0
        except OSError:
            file.close()  # the next try opens it anew
            raise

    def _fresh(self) -> io.FileIO:
        if self._file.closed and not self.closed:
            self._file = self._opened()
        return self._file
