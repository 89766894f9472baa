"""What a storage needs of the place where its files are, and what goes wrong there."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from pyarrow import fs

from cluster.errors import ShoalError


class StorageError(ShoalError):
    """The storage could not be read or written; the message says what, where and why."""


class MissingError(StorageError):
    """There is nothing at that path."""


@dataclass(frozen=True)
class Entry:
    """One file or directory of a listing."""

    name: str
    is_dir: bool
    size_bytes: int


class Backend(Protocol):
    """A directory in some file system; paths are relative to it, with `/` between the parts, `""` is itself.

    What goes wrong is told as OSError or ArrowException, and put in words by whoever calls (Storage).
    """

    @property
    def appendable(self) -> bool:
        """Whether `append` and `claim_dir` work."""

    @property
    def takes_at_once(self) -> int:
        """How many files it is best given at the same time."""

    def location(self, path: str) -> str:
        """The absolute local path, or the URI."""

    def local_path(self, path: str) -> Path | None:
        """The path on this machine; None where it is no local file system."""

    def pyarrow(self, path: str) -> tuple[fs.FileSystem, str]:
        """A file system, and the path in it."""

    def write(self, path: str, data: bytes) -> None:
        """Write a whole file: readers see all of the old or all of the new one."""

    def read(self, path: str, start: int) -> bytes: ...

    def writer(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A file that is there in part while it is written."""

    def reader(self, path: str) -> AbstractContextManager[BinaryIO]: ...

    def size_bytes(self, path: str) -> int | None:
        """The size of a file; None where there is none."""

    def move(self, path: str, to: str) -> None: ...

    def append(self, path: str, data: bytes) -> None:
        """Add lines, which end with a line's end, in one write: all of them, or none."""

    def entries(self, path: str) -> list[Entry]:
        """What is directly in a directory, in any order; nothing where it is not there."""

    def files(self, path: str) -> list[str]:
        """The paths, from a directory, of all files below it, in any order; nothing where it is not there."""

    def exists(self, path: str) -> bool: ...

    def make_dir(self, path: str) -> None: ...

    def delete(self, path: str) -> None:
        """Delete a file, if it is there."""

    def delete_dir(self, path: str) -> None:
        """Delete a directory and all in it, if it is there."""

    def take(self, source: BinaryIO, path: str) -> None:
        """Copy what a reader has to its end; the file is there whole or not at all."""

    def download_dir(self, path: str, local: str | os.PathLike[str]) -> None: ...

    def claim_dir(self, staged: str, path: str) -> bool:
        """Rename a directory to a name that nobody has; False when it is taken."""
