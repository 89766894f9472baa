"""Copies that a node keeps of directories that lie elsewhere: fetched once, and not for ever."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SHARE = 0.5
"""Of the disk's room that the cache and nobody else has, so much is the cache's at most."""
RECENT_S = 3600.0
"""What was asked for within this time stays: whoever asked may still read it."""
_USED = ".used"
_LOCK = ".lock"


@dataclass(frozen=True)
class _Copy:
    directory: Path
    used_at: float
    size_bytes: int


class NodeCache:
    """Directories by name, under one directory of a node; all processes of the node share them.

    Whoever asks first for one fetches it, and the others wait. When one is fetched, those that were not asked
    for longest make room, where all together would take more than the cache may have.

    Args:
        root: made when it is needed.
        most_bytes: what the cache may have; None for half of what is free on its disk, itself included.
    """

    def __init__(self, root: Path, most_bytes: int | None = None) -> None:
        self._root = root
        self._most_bytes = most_bytes

    def get(self, name: str, fetch: Callable[[Path], None]) -> Path:
        """The copy of this name.

        Args:
            name: a relative path.
            fetch: fills a new directory; called where there is no copy yet.
        """
        copy = self._root / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(copy):
            if not copy.is_dir():
                staged = copy.with_name(f".{copy.name}.{uuid.uuid4().hex}")
                try:
                    fetch(staged)
                    staged.rename(copy)
                finally:
                    shutil.rmtree(staged, ignore_errors=True)
            self._beside(copy, _USED).touch()
        self.prune()
        return copy

    def prune(self) -> list[Path]:
        """Delete the copies that are over the bound, those that were not asked for longest; returns them."""
        copies = sorted(self._copies(), key=lambda copy: copy.used_at)
        total, most, now = sum(copy.size_bytes for copy in copies), self._most(copies), time.time()
        gone = []
        for copy in copies:
            if total <= most or now - copy.used_at < RECENT_S:
                break
            with self._locked(copy.directory):
                shutil.rmtree(copy.directory, ignore_errors=True)
                self._beside(copy.directory, _USED).unlink(missing_ok=True)
            total -= copy.size_bytes
            gone.append(copy.directory)
        return gone

    def _copies(self) -> Iterator[_Copy]:
        """Those that are whole, by the marks beside them; others may come and go meanwhile."""
        for mark in self._root.rglob(f".*{_USED}"):
            directory = mark.with_name(mark.name[1 : -len(_USED)])
            with suppress(OSError):
                yield _Copy(directory, mark.stat().st_mtime, size_of(directory))

    def _most(self, copies: list[_Copy]) -> float:
        if self._most_bytes is not None:
            return self._most_bytes
        free = shutil.disk_usage(self._root).free
        return SHARE * (free + sum(copy.size_bytes for copy in copies))

    @contextmanager
    def _locked(self, copy: Path) -> Iterator[None]:
        with self._beside(copy, _LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @staticmethod
    def _beside(copy: Path, suffix: str) -> Path:
        return copy.with_name(f".{copy.name}{suffix}")


def size_of(directory: Path) -> int:
    """Bytes of all files below a directory."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(path, name)).st_size
    return total
