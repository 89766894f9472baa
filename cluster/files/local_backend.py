"""A storage's files in a directory of a local, or mounted, file system."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pyarrow import fs

from cluster.files.backend import Entry
from cluster.files.local_files import copy_whole, flush_dir, temporary_name, write_whole
from cluster.files.retries import PatientLocalFile, patiently

_BUFFER = 1 << 20


class LocalBackend:
    """Every write is atomic: a temporary file beside the target, flushed to the disk, then renamed over it.

    The directory is made at the first write, with a `.gitignore` that keeps its content out of git and out
    of the packages that Ray makes of working directories.
    """

    appendable = True
    takes_at_once = 1

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def location(self, path: str) -> str:
        return str(self.local_path(path))

    def local_path(self, path: str) -> Path:
        return self._directory / path

    def pyarrow(self, path: str) -> tuple[fs.FileSystem, str]:
        return fs.LocalFileSystem(), self.location(path)

    def write(self, path: str, data: bytes) -> None:
        write_whole(self._make_parent(path), data)

    def read(self, path: str, start: int) -> bytes:
        def read() -> bytes:
            with self.local_path(path).open("rb") as file:
                file.seek(start)
                return file.read()

        return patiently(read, local=True)

    @contextmanager
    def writer(self, path: str) -> Iterator[BinaryIO]:
        with open(self._make_parent(path), "wb") as file:
            yield file

    @contextmanager
    def reader(self, path: str) -> Iterator[BinaryIO]:
        with io.BufferedReader(PatientLocalFile(self.local_path(path)), _BUFFER) as file:
            yield file

    def size_bytes(self, path: str) -> int | None:
        local = self.local_path(path)
        return patiently(lambda: local.stat().st_size if local.is_file() else None, local=True)

    def move(self, path: str, to: str) -> None:
        os.replace(self.local_path(path), self._make_parent(to))

    def append(self, path: str, data: bytes) -> None:
        with open(self._make_parent(path), "ab+", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            if before > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # what a writer that was killed left stays a line of its own
                    data = b"\n" + data
            if file.write(data) < len(data):
                file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def entries(self, path: str) -> list[Entry]:
        return patiently(lambda: _entries(self.local_path(path)), local=True)

    def files(self, path: str) -> list[str]:
        directory = self.local_path(path)
        return [each.relative_to(directory).as_posix() for each in directory.rglob("*") if each.is_file()]

    def exists(self, path: str) -> bool:
        return patiently(self.local_path(path).exists, local=True)

    def make_dir(self, path: str) -> None:
        self._make()
        self.local_path(path).mkdir(parents=True, exist_ok=True)

    def delete(self, path: str) -> None:
        self.local_path(path).unlink(missing_ok=True)

    def delete_dir(self, path: str) -> None:
        local = self.local_path(path)
        if local.is_dir():
            leaving = local.with_name(temporary_name(local.name))  # gone at once, or whole
            os.rename(local, leaving)
            shutil.rmtree(leaving)

    def take(self, source: BinaryIO, path: str) -> None:
        copy_whole(source, self._make_parent(path))

    def download_dir(self, path: str, local: str | os.PathLike[str]) -> None:
        source, target = self.location(path), str(local)
        here = fs.LocalFileSystem()
        patiently(lambda: fs.copy_files(source, target, here, here), local=True)

    def claim_dir(self, staged: str, path: str) -> bool:
        target = self.local_path(path)
        try:
            os.rename(self.local_path(staged), target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                return False
            raise
        flush_dir(target.parent)
        return True

    def _make(self) -> None:
        try:
            empty = not any(os.scandir(self._directory))
        except FileNotFoundError:
            self._directory.mkdir(parents=True, exist_ok=True)
            empty = True
        # A directory that holds something already is somebody's: hiding it from git is not ours to do.
        if empty:
            write_whole(self._directory / ".gitignore", b"*\n")

    def _make_parent(self, path: str) -> Path:
        self._make()
        local = self.local_path(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        return local


def _entries(directory: Path) -> list[Entry]:
    entries = []
    try:
        with os.scandir(directory) as found:
            for item in found:
                try:
                    entries.append(Entry(item.name, item.is_dir(), item.stat().st_size))
                except FileNotFoundError:
                    # Deleted between the listing and the look: it is not there.
                    continue
    except FileNotFoundError:
        return []
    return entries
