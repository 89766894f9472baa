"""A run's files as one node sees them: in the storage itself where that is mounted, else in a copy."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from cluster.files.storage import Storage

_COMPLETE = ".complete"
"""Appended to a directory's name in the storage: written when all of the directory is there. It holds a word,
another one each time that the directory is put there; a node keeps the word of the copy that it has."""
_IN_USE = ".in-use"
_KEPT_S = 7 * 86400.0
"""What a node has copied of other runs is deleted after this time: the run may have ended elsewhere."""


class Workspace:
    """The directory of a run on this node.

    Data and exported models are files that libraries open by their path. On storage that every node mounts
    they lie in the run's directory there. An object store has no paths: there whoever makes them puts them
    into the storage, or writes them there and declares them, and each node that needs them fetches them once.

    Attributes:
        storage: the run's directory in the storage.
        mounted: whether `directory` is that directory itself.
        directory: where the run's files are on this node.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        local = storage.local_path()
        self.mounted = local is not None
        self.directory = local if local is not None else _scratch(storage.location)
        self._in_use: TextIO | None = None if self.mounted else _use(self.directory)

    def put(self, name: str) -> None:
        """Put a directory that was made here where every node finds it; what was there is replaced."""
        if self.mounted or not (self.directory / name).is_dir():
            return
        self.forget(name)
        self.storage.upload_dir(self.directory / name, name)
        self._word(name).write_bytes(self.declare(name))

    def declare(self, name: str) -> bytes:
        """Let every node find what there is of a directory in the storage, which is all now; its word."""
        word = uuid.uuid4().hex.encode()
        if not self.mounted and self.storage.exists(name):
            self.storage.write_bytes(name + _COMPLETE, word)
        return word

    def has(self, name: str) -> bool:
        """Whether every node finds a directory."""
        return self.mounted or self.storage.exists(name + _COMPLETE)

    def fetch(self, name: str) -> None:
        """Have a directory here as it was last put, if somebody has put it.

        The processes of a node fetch it once: the first one does, the others wait for it.
        """
        if self.mounted or not self.has(name):
            return
        target, here = self.directory / name, self._word(name)
        with self._locked(name):
            word = self.storage.read_bytes(name + _COMPLETE)
            if target.is_dir() and here.exists() and here.read_bytes() == word:
                return
            staged = target.with_name(f".{name}-{os.getpid()}")
            shutil.rmtree(staged, ignore_errors=True)
            self.storage.download_dir(name, staged)
            here.unlink(missing_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            staged.rename(target)
            here.write_bytes(word)

    def forget(self, name: str) -> None:
        """Delete a directory from the storage; a copy that a node has of it stays."""
        if self.mounted:
            shutil.rmtree(self.directory / name, ignore_errors=True)
            return
        self.storage.delete(name + _COMPLETE)
        self.storage.delete_dir(name)

    def clear(self) -> None:
        """Delete what this node has copied, at the end of the run."""
        if self._in_use is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._in_use.close()

    def _word(self, name: str) -> Path:
        return self.directory / f".{name}.word"

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self.directory / f".{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _scratch(location: str) -> Path:
    """The directory of a run's copies on this node, ours alone."""
    root = Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}-runs"
    root.mkdir(mode=0o700, exist_ok=True)
    for other in root.iterdir():
        with suppress(OSError):  # somebody else clears away at the same time, or it is in use
            _forget_old(other)
    directory = root / hashlib.sha256(location.encode()).hexdigest()[:16]
    directory.mkdir(exist_ok=True)
    os.utime(directory)
    return directory


def _forget_old(directory: Path) -> None:
    """Delete a run's copies that nobody has used for long, and uses now."""
    if time.time() - directory.stat().st_mtime <= _KEPT_S:
        return
    with (directory / _IN_USE).open("a") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)


def _use(directory: Path) -> TextIO:
    """Keep others from deleting a directory for as long as this process lives, or the file is open."""
    mark = (directory / _IN_USE).open("a")
    fcntl.flock(mark, fcntl.LOCK_SH)
    return mark
