"""Faults of storage: a small file system of its own that fills up, takes no write, or is away."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import ShoalError

SIZE_BYTES = 64 * 2**20
_FILLING = ".filling"
_PIECE_BYTES = 2**20
_PAGE_BYTES = 4096
_BUSY_S = 10.0


def missing() -> str | None:
    """Why no file system can be mounted here; None where one can."""
    if os.geteuid() != 0:
        return "mounting a file system is root's"
    with tempfile.TemporaryDirectory() as directory:
        try:
            _call("mount", "-t", "tmpfs", "tmpfs", directory)
        except ShoalError as error:
            return str(error)
        _call("umount", directory)
    return None


class Disk:
    """A file system in memory, mounted at a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def fill(self, leave_bytes: int = 0) -> None:
        """Use up all room but so much, in whole pages."""
        with (self.directory / _FILLING).open("ab", buffering=0) as file:
            for size in (_PIECE_BYTES, _PAGE_BYTES):
                try:
                    while self.free_bytes > leave_bytes + size or leave_bytes == 0:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def empty(self) -> None:
        """Give back what was used up."""
        (self.directory / _FILLING).unlink()

    @property
    def free_bytes(self) -> int:
        figures = os.statvfs(self.directory)
        return figures.f_bavail * figures.f_frsize

    def refuse_writes(self) -> None:
        """Mount it read-only; whoever has a file open for writing is waited for."""
        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                return _call("mount", "-o", "remount,ro", str(self.directory))
            except ShoalError:
                if time.monotonic() > deadline:
                    raise

    def take_writes(self) -> None:
        _call("mount", "-o", "remount,rw", str(self.directory))

    def take_away(self) -> None:
        """Nothing is there, and nothing can be made there, as where a mount was lost."""
        _call("mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", str(self.directory))

    def bring_back(self) -> None:
        _call("umount", "--lazy", str(self.directory))


@contextmanager
def disk(directory: Path) -> Iterator[Disk]:
    """A file system at a directory, which is made; see `missing`."""
    directory.mkdir()
    _call("mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(directory))
    try:
        yield Disk(directory)
    finally:
        while os.path.ismount(directory):  # whatever lies on top of it goes too
            _call("umount", "--lazy", str(directory))
        directory.rmdir()


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise ShoalError(f"{' '.join(command)}: {done.stderr.strip()}")
