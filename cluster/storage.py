"""Where jobs and models are kept: one directory or bucket, reached through pyarrow.fs.

On a local (or mounted) file system every write is atomic: a temporary file beside the target, flushed to
the disk, then renamed over it. An object store's put is atomic by itself. Anything else (HDFS) is written
beside the target and moved.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import pyarrow as pa
from pyarrow import fs

from cluster.errors import RequestError, ShoalError
from cluster.local_files import HIDDEN, copy_whole, flush_dir, temporary_name, write_whole
from cluster.storage_locations import bounded, local_path_of, reason
from cluster.storage_retries import PatientFile, PatientLocalFile, patiently

OBJECT_STORES = ("s3", "gcs", "abfs")
"""The type names of pyarrow's object stores: a put is atomic there, and directories need not be made."""
SCHEMES = "file, s3, gs, hdfs, abfs"
_BUFFER = 1 << 20


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


class Storage:
    """A directory in some file system; all paths are relative to it, with `/` between the parts.

    Nothing is touched until it is used. A local directory is made at the first write, with a `.gitignore`
    that keeps its content out of git and out of the packages that Ray makes of working directories.

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
        text = os.fspath(location)
        if not text.strip() or "\0" in text:
            raise RequestError(f"storage: {text!r} is neither a path nor a URI ({SCHEMES})")
        self._base: Path | None = None
        """The storage's own directory, on a local file system."""
        self._inner: str = ""
        """Where we are below the base (children of a storage)."""
        self._filesystem = filesystem
        self._root = text
        """The storage's directory in the terms of `filesystem`."""
        self._uri: str | None = None
        self._query: str = ""
        """Options of the file system, after the `?` of the URI."""
        if filesystem is not None:
            return
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/|(file):", text)
        if scheme is None and "://" not in text:
            self._base = Path(os.path.abspath(os.path.expanduser(text)))
            self._root = str(self._base)
        elif scheme is not None and "file" in scheme.groups():
            self._base = local_path_of(text)
            self._root = str(self._base)
        else:
            before, mark, after = text.partition("://")
            after, _, self._query = after.partition("?")
            if not mark or not after.strip("/"):
                raise RequestError(f"storage {text}: :// and a bucket or host must follow the scheme")
            self._uri = f"{before}://{after.rstrip('/')}"

    @property
    def location(self) -> str:
        """The absolute local path, or the URI, of this directory."""
        base = str(self._base) if self._base is not None else self._uri or self._root
        inner = f"{base.rstrip('/')}/{self._inner}" if self._inner else base
        return f"{inner}?{self._query}" if self._query else inner

    @property
    def appendable(self) -> bool:
        """Whether `append_lines` works here; where not, files are written whole."""
        return self._base is not None

    def child(self, *parts: str) -> Storage:
        """The storage of a directory below this one; nothing is made."""
        below = Storage.__new__(Storage)
        below.__dict__.update(self.__dict__)
        below._inner = self._join("/".join(parts))
        return below

    def local_path(self, path: str = "") -> Path | None:
        """The absolute path on this machine, or None where the storage is not a local file system."""
        return None if self._base is None else self._base / self._join(path)

    def pyarrow(self) -> tuple[fs.FileSystem, str]:
        """The directory for libraries that write through pyarrow.fs: a file system, and a path in it."""
        return self._open(), self._target("")

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
        with self._explained("write", path):
            if self._base is not None:
                write_whole(self._make_parent(path), data)
                return
            filesystem, target = self._open(), self._target(path)
            if filesystem.type_name in OBJECT_STORES:
                with filesystem.open_output_stream(target) as stream:
                    stream.write(data)
                return
            parent, name = target.rsplit("/", 1) if "/" in target else ("", target)
            if parent:
                filesystem.create_dir(parent, recursive=True)
            beside = f"{parent}/{temporary_name(name)}".lstrip("/" if not parent else "")
            with filesystem.open_output_stream(beside) as stream:
                stream.write(data)
            filesystem.move(beside, target)

    def read_bytes(self, path: str, start: int = 0) -> bytes:
        """The whole file, or its bytes from one on.

        Raises:
            MissingError: there is no such file.
        """
        with self._explained("read", path):
            if (local := self.local_path(path)) is not None:
                return patiently(lambda: _read_from(local, start), local=True)
            return patiently(lambda: self._read_from(path, start))

    def _read_from(self, path: str, start: int) -> bytes:
        if start == 0:
            with self._open().open_input_stream(self._target(path)) as stream:
                return bytes(stream.read())
        with self._open().open_input_file(self._target(path)) as file:
            return bytes(file.read_at(max(0, file.size() - start), start))

    @contextmanager
    def writer(self, path: str) -> Iterator[BinaryIO]:
        """A file that is written bit by bit, and is there in part meanwhile: whoever reads needs a marker.

        On a local file system it has a `fileno`, which can be flushed to the disk.
        """
        with self._explained("write", path):
            if self._base is not None:
                with open(self._make_parent(path), "wb") as file:
                    yield file
                return
            if self._open().type_name not in OBJECT_STORES and "/" in self._target(path):
                self._open().create_dir(self._target(path).rsplit("/", 1)[0], recursive=True)
            with self._open().open_output_stream(self._target(path)) as stream:
                yield stream

    @contextmanager
    def reader(self, path: str) -> Iterator[BinaryIO]:
        """A file to read from anywhere.

        Raises:
            MissingError: there is no such file.
        """
        with self._explained("read", path):
            if (local := self.local_path(path)) is not None:
                with io.BufferedReader(PatientLocalFile(local), _BUFFER) as file:
                    yield file
                return
            with self._open().open_input_file(self._target(path)) as stream:
                yield io.BufferedReader(PatientFile(stream), _BUFFER)

    def size_bytes(self, path: str) -> int | None:
        """The size of a file; None where there is none."""
        with self._explained("look for", path):
            if (local := self.local_path(path)) is not None:
                return patiently(lambda: local.stat().st_size if local.is_file() else None, local=True)
            size: int | None = self._open().get_file_info(self._target(path)).size
            return size

    def move(self, path: str, to: str) -> None:
        """Rename a file; what is at the new path is replaced."""
        with self._explained("write", to):
            if self._base is not None:
                os.replace(self._base / self._join(path), self._make_parent(to))
            else:
                self._open().move(self._target(path), self._target(to))

    def append_lines(self, path: str, lines: Iterable[str]) -> None:
        """Add lines at the end of a file, in one write; only where the storage is `appendable`.

        What a writer that was killed left of its last line stays a line of its own. Where there was no room
        for all of it, nothing is added.
        """
        if self._base is None:
            raise StorageError(f"{self.location} cannot append to files: write {path!r} whole instead")
        data = "".join(f"{line}\n" for line in lines).encode()
        with self._explained("append to", path), open(self._make_parent(path), "ab+", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            if before > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    data = b"\n" + data
            if file.write(data) < len(data):
                file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def entries(self, path: str = "") -> list[Entry]:
        """What is directly in a directory, by name, without hidden names; empty when it is not there."""
        with self._explained("list", path):
            if (local := self.local_path(path)) is not None:
                found = patiently(lambda: _list_local(local), local=True)
            else:
                selector = fs.FileSelector(self._target(path), allow_not_found=True)
                found = [
                    Entry(info.base_name, info.type == fs.FileType.Directory, info.size or 0)
                    for info in self._open().get_file_info(selector)
                ]
        return sorted((entry for entry in found if not entry.name.startswith(HIDDEN)), key=lambda e: e.name)

    def list(self, path: str = "") -> list[str]:
        """The names directly in a directory, sorted; empty when it is not there."""
        return [entry.name for entry in self.entries(path)]

    def exists(self, path: str = "") -> bool:
        """Whether there is a file or a directory."""
        with self._explained("look for", path):
            if (local := self.local_path(path)) is not None:
                return patiently(local.exists, local=True)
            return bool(self._open().get_file_info(self._target(path)).type != fs.FileType.NotFound)

    def make_dir(self, path: str = "") -> None:
        """Make a directory and those above it; nothing happens when it is there."""
        with self._explained("make", path):
            if (local := self.local_path(path)) is not None:
                self._make_base()
                local.mkdir(parents=True, exist_ok=True)
            elif self._open().type_name not in OBJECT_STORES:
                self._open().create_dir(self._target(path), recursive=True)

    def delete(self, path: str) -> None:
        """Delete a file; nothing happens when it is not there."""
        with self._explained("delete", path):
            if (local := self.local_path(path)) is not None:
                local.unlink(missing_ok=True)
            elif self.exists(path):
                self._open().delete_file(self._target(path))

    def delete_dir(self, path: str) -> None:
        """Delete a directory and all in it; on a local file system it is gone at once or whole.

        Raises:
            RequestError: the path is empty: the storage itself is never deleted.
        """
        if not self._join(path):
            raise RequestError(f"the storage {self.location} itself is not deleted; name a directory in it")
        with self._explained("delete", path):
            if (local := self.local_path(path)) is not None:
                if local.is_dir():
                    leaving = local.with_name(temporary_name(local.name))
                    os.rename(local, leaving)
                    shutil.rmtree(leaving)
            elif self.exists(path):
                self._open().delete_dir(self._target(path))

    def upload_dir(
        self, local: str | os.PathLike[str], path: str = "", *, skip: Collection[str] = ()
    ) -> None:
        """Copy the files of a local directory (links followed) into one of the storage; each file is atomic.

        What is there already stays, or is replaced by a file of the same name. The files come in the order
        of their paths; whoever needs all or nothing writes a marker afterwards. `skip` names paths in the
        local directory that are left out.
        """
        source = Path(local)
        if not source.is_dir():
            raise MissingError(f"{source} is not a directory, so it cannot be copied to {self.location}")
        for file in sorted(file for file in source.rglob("*") if file.is_file()):
            if file.relative_to(source).as_posix() in skip:
                continue
            name = (
                f"{path}/{file.relative_to(source).as_posix()}"
                if path
                else file.relative_to(source).as_posix()
            )
            with self._explained("write", name):
                if self._base is not None:
                    copy_whole(file, self._make_parent(name))
                    continue
                if self._open().type_name not in OBJECT_STORES:
                    self._open().create_dir(self._target(name).rsplit("/", 1)[0], recursive=True)
                fs.copy_files(str(file), self._target(name), fs.LocalFileSystem(), self._open())

    def download_dir(self, path: str, local: str | os.PathLike[str]) -> None:
        """Copy a directory of the storage into a local one, which is made.

        Raises:
            MissingError: there is no such directory.
        """
        if not self.exists(path):
            raise MissingError(f"there is no {path!r} in {self.location}")
        Path(local).mkdir(parents=True, exist_ok=True)
        with self._explained("read", path):
            filesystem = fs.LocalFileSystem() if self._base is not None else self._open()
            source, target = self._target(path), str(local)
            patiently(
                lambda: fs.copy_files(source, target, filesystem, fs.LocalFileSystem()),
                local=self._base is not None,
            )

    def claim_dir(self, staged: str, path: str) -> bool:
        """Rename a directory of a local storage to `path`; False when that is taken: one of many wins."""
        source, target = self.local_path(staged), self.local_path(path)
        if source is None or target is None:
            raise StorageError(f"{self.location} cannot rename directories")
        with self._explained("write", path):
            try:
                os.rename(source, target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    return False
                raise
            flush_dir(target.parent)
        return True

    def _join(self, path: str) -> str:
        parts = PurePosixPath(path).parts
        if path.startswith("/") or ".." in parts or "\0" in path:
            raise RequestError(
                f"{path!r} is not a path inside the storage {self.location}: no leading / and no .."
            )
        return "/".join((self._inner, *parts)) if self._inner else "/".join(parts)

    def _target(self, path: str) -> str:
        """The path in the terms of the file system."""
        self._open()
        return "/".join(part for part in (self._root.rstrip("/"), self._join(path)) if part)

    def _open(self) -> fs.FileSystem:
        if self._filesystem is None:
            try:
                if self._uri is None:
                    self._filesystem = fs.LocalFileSystem()
                else:
                    self._filesystem, self._root = fs.FileSystem.from_uri(bounded(self._uri, self._query))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
                raise RequestError(
                    f"storage {self._uri}: not a location that pyarrow.fs opens (a path, or a URI of"
                    f" {SCHEMES}): {reason(error)}"
                ) from error
            except OSError as error:
                raise StorageError(f"storage {self._uri} cannot be reached: {reason(error)}") from error
        return self._filesystem

    def _make_base(self) -> None:
        assert self._base is not None
        try:
            empty = not any(os.scandir(self._base))
        except FileNotFoundError:
            self._base.mkdir(parents=True, exist_ok=True)
            empty = True
        # A directory that holds something already is somebody's: hiding it from git is not ours to do.
        if empty:
            write_whole(self._base / ".gitignore", b"*\n")

    def _make_parent(self, path: str) -> Path:
        self._make_base()
        local = self.local_path(path)
        assert local is not None
        local.parent.mkdir(parents=True, exist_ok=True)
        return local

    @contextmanager
    def _explained(self, verb: str, path: str) -> Iterator[None]:
        """Say what could not be done, where, and why."""
        place = self.child(path).location if path else self.location
        try:
            yield
        except FileNotFoundError as error:
            if verb == "read":
                raise MissingError(f"cannot read {place}: it is not there") from error
            raise StorageError(f"cannot {verb} {place}: {reason(error)}") from error
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"cannot {verb} {place}: {reason(error)}") from error


def _read_from(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def _list_local(directory: Path) -> list[Entry]:
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
