"""Where jobs and models are kept: one directory or bucket, of a local file system or over pyarrow.fs."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import pyarrow as pa
from pyarrow import fs

from cluster.errors import RequestError
from cluster.files.backend import Backend, Entry, MissingError, StorageError
from cluster.files.local_backend import LocalBackend
from cluster.files.local_files import HIDDEN
from cluster.files.locations import read_location, reason
from cluster.files.remote_backend import RemoteBackend


class Storage:
    """A directory in some file system; all paths are relative to it, with `/` between the parts.

    Nothing is touched until it is used.

    Example:
        >>> import tempfile
        >>> storage = Storage(tempfile.mkdtemp())
        >>> storage.child("jobs", "demo").write_bytes("note.txt", b"hello")
        >>> storage.list("jobs"), storage.read_bytes("jobs/demo/note.txt")
        (['demo'], b'hello')

    Args:
        location: a path (made absolute), or a URI that pyarrow.fs knows.
        filesystem: the file system, where `location` is a path inside one that is open already.

    Raises:
        RequestError: the location is empty or its scheme is unknown.
    """

    def __init__(self, location: str | os.PathLike[str], *, filesystem: fs.FileSystem | None = None) -> None:
        self._backend = _backend(os.fspath(location), filesystem)
        self._inner: str = ""
        """Where we are below the backend's directory (children of a storage)."""

    @property
    def location(self) -> str:
        """The absolute local path, or the URI, of this directory."""
        return self._backend.location(self._inner)

    @property
    def appendable(self) -> bool:
        """Whether `append_lines` works here; where not, files are written whole."""
        return self._backend.appendable

    def child(self, *parts: str) -> Storage:
        """The storage of a directory below this one; nothing is made."""
        below = Storage.__new__(Storage)
        below._backend, below._inner = self._backend, self._join("/".join(parts))
        return below

    def local_path(self, path: str = "") -> Path | None:
        """The absolute path on this machine, or None where the storage is not a local file system."""
        return self._backend.local_path(self._join(path))

    def pyarrow(self) -> tuple[fs.FileSystem, str]:
        """The directory for libraries that write through pyarrow.fs: a file system, and a path in it."""
        return self._backend.pyarrow(self._inner)

    def prepare(self) -> None:
        """Make the directory (a local one with its `.gitignore`), and see that it can be written.

        Raises:
            StorageError: it cannot be made or written.
        """
        probe = f"{HIDDEN}probe-{uuid.uuid4().hex}"
        self.write_bytes(probe, b"")
        self.delete(probe)

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a whole file: readers see all of the old or all of the new one."""
        with self._explained("write", path) as inside:
            self._backend.write(inside, data)

    def read_bytes(self, path: str, start: int = 0) -> bytes:
        """The whole file, or its bytes from one on.

        Raises:
            MissingError: there is no such file.
        """
        with self._explained("read", path) as inside:
            return self._backend.read(inside, start)

    @contextmanager
    def writer(self, path: str) -> Iterator[BinaryIO]:
        """A file that is written bit by bit, and is there in part meanwhile: whoever reads needs a marker.

        On a local file system it has a `fileno`, which can be flushed to the disk.
        """
        with self._explained("write", path) as inside, self._backend.writer(inside) as file:
            yield file

    @contextmanager
    def reader(self, path: str) -> Iterator[BinaryIO]:
        """A file to read from anywhere.

        Raises:
            MissingError: there is no such file.
        """
        with self._explained("read", path) as inside, self._backend.reader(inside) as file:
            yield file

    def size_bytes(self, path: str) -> int | None:
        """The size of a file; None where there is none."""
        with self._explained("look for", path) as inside:
            return self._backend.size_bytes(inside)

    def move(self, path: str, to: str) -> None:
        """Rename a file; what is at the new path is replaced."""
        with self._explained("write", to) as inside:
            self._backend.move(self._join(path), inside)

    def append_lines(self, path: str, lines: Iterable[str]) -> None:
        """Add lines at the end of a file, in one write; only where the storage is `appendable`.

        What a writer that was killed left of its last line stays a line of its own. Where there was no room
        for all of it, nothing is added.
        """
        data = "".join(f"{line}\n" for line in lines).encode()
        with self._explained("append to", path) as inside:
            self._backend.append(inside, data)

    def entries(self, path: str = "") -> list[Entry]:
        """What is directly in a directory, by name, without hidden names; empty when it is not there."""
        with self._explained("list", path) as inside:
            found = self._backend.entries(inside)
        return sorted((entry for entry in found if not entry.name.startswith(HIDDEN)), key=lambda e: e.name)

    def files(self, path: str = "") -> list[str]:
        """The paths of all files below a directory, from it, sorted; empty when it is not there."""
        with self._explained("list", path) as inside:
            return sorted(self._backend.files(inside))

    def list(self, path: str = "") -> list[str]:
        """The names directly in a directory, sorted; empty when it is not there."""
        return [entry.name for entry in self.entries(path)]

    def exists(self, path: str = "") -> bool:
        """Whether there is a file or a directory."""
        with self._explained("look for", path) as inside:
            return self._backend.exists(inside)

    def make_dir(self, path: str = "") -> None:
        """Make a directory and those above it; nothing happens when it is there."""
        with self._explained("make", path) as inside:
            self._backend.make_dir(inside)

    def delete(self, path: str) -> None:
        """Delete a file; nothing happens when it is not there."""
        with self._explained("delete", path) as inside:
            self._backend.delete(inside)

    def delete_dir(self, path: str) -> None:
        """Delete a directory and all in it; on a local file system it is gone at once or whole.

        Raises:
            RequestError: the path is empty: the storage itself is never deleted.
        """
        if not self._join(path):
            raise RequestError(f"the storage {self.location} itself is not deleted; name a directory in it")
        with self._explained("delete", path) as inside:
            self._backend.delete_dir(inside)

    def upload_dir(
        self, local: str | os.PathLike[str], path: str = "", *, skip: Collection[str] = ()
    ) -> None:
        """Copy the files of a local directory (links followed) into one of the storage; each file is atomic.

        What is there already stays, or is replaced by a file of the same name. Whoever needs all or nothing
        writes a marker afterwards. `skip` names paths in the local directory that are left out.
        """
        if not Path(local).is_dir():
            raise MissingError(f"{local} is not a directory, so it cannot be copied to {self.location}")
        self.copy_dir(Storage(local), path, skip=skip)

    def copy_dir(self, source: Storage, path: str = "", *, skip: Collection[str] = ()) -> None:
        """Copy the files of another storage into a directory of this one, as `upload_dir` does.

        What is in neither of them on this machine comes by this process's memory, some of it at a time. No
        store is asked to copy by itself: pyarrow does so in one request a file, which S3 refuses above 5 GiB,
        and which its client gives up and makes again, on and on, after three seconds without an answer.
        """
        names = sorted(name for name in source.files() if name not in skip)

        def copy(name: str) -> None:
            with (
                source.reader(name) as reader,
                self._explained("write", f"{path}/{name}" if path else name) as inside,
            ):
                self._backend.take(reader, inside)

        with ThreadPoolExecutor(self._backend.takes_at_once) as threads:
            copies = [threads.submit(copy, name) for name in names]
            try:
                for each in copies:
                    each.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def download_dir(self, path: str, local: str | os.PathLike[str]) -> None:
        """Copy a directory of the storage into a local one, which is made.

        Raises:
            MissingError: there is no such directory.
        """
        if not self.exists(path):
            raise MissingError(f"there is no {path!r} in {self.location}")
        Path(local).mkdir(parents=True, exist_ok=True)
        with self._explained("read", path) as inside:
            self._backend.download_dir(inside, local)

    def claim_dir(self, staged: str, path: str) -> bool:
        """Rename a directory of a local storage to `path`; False when that is taken: one of many wins."""
        with self._explained("write", path) as inside:
            return self._backend.claim_dir(self._join(staged), inside)

    def _join(self, path: str) -> str:
        parts = PurePosixPath(path).parts
        if path.startswith("/") or ".." in parts or "\0" in path:
            raise RequestError(
                f"{path!r} is not a path inside the storage {self.location}: no leading / and no .."
            )
        return "/".join((self._inner, *parts)) if self._inner else "/".join(parts)

    @contextmanager
    def _explained(self, verb: str, path: str) -> Iterator[str]:
        """The path below the backend's directory; what could not be done there is said, where, and why."""
        inside = self._join(path)
        place = self._backend.location(inside)
        try:
            yield inside
        except FileNotFoundError as error:
            if verb == "read":
                raise MissingError(f"cannot read {place}: it is not there") from error
            raise StorageError(f"cannot {verb} {place}: {reason(error)}") from error
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"cannot {verb} {place}: {reason(error)}") from error


def as_storage(directory: Storage | str | os.PathLike[str]) -> Storage:
    """A directory as a storage, however it is named."""
    return directory if isinstance(directory, Storage) else Storage(directory)


def _backend(location: str, filesystem: fs.FileSystem | None) -> Backend:
    if filesystem is not None:
        return RemoteBackend(location, filesystem=filesystem)
    local, uri, query = read_location(location)
    return LocalBackend(local) if local is not None else RemoteBackend(uri, query)
