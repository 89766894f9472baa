"""A storage's files in a file system that pyarrow.fs reaches: an object store, or HDFS."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import pyarrow as pa
from pyarrow import fs

from cluster.errors import RequestError
from cluster.files.backend import Entry, StorageError
from cluster.files.local_files import temporary_name
from cluster.files.locations import SCHEMES, bounded, reason
from cluster.files.retries import PatientFile, patiently

OBJECT_STORES = ("s3", "gcs", "abfs")
"""The type names of pyarrow's object stores: a put is atomic there, and directories need not be made."""
_BUFFER = 1 << 20
_PIECE = 16 << 20
_AHEAD_BYTES = 32 << 20
"""So much of a file is on its way at most: pyarrow sends in the background, and keeps all that is written
faster than it leaves."""


class RemoteBackend:
    """An object store's put is atomic by itself; elsewhere files are written beside their target and moved.

    Args:
        uri: without its options; or the path in `filesystem`.
        query: options of the file system, what follows the `?` of the URI.
        filesystem: one that is open already; else it is opened when it is first used.
    """

    appendable = False
    takes_at_once = 4

    def __init__(self, uri: str, query: str = "", filesystem: fs.FileSystem | None = None) -> None:
        self._uri = uri
        self._query = query
        self._filesystem = filesystem
        self._root = uri
        """The directory in the terms of the file system."""

    def location(self, path: str) -> str:
        inner = f"{self._uri.rstrip('/')}/{path}" if path else self._uri
        return f"{inner}?{self._query}" if self._query else inner

    def local_path(self, path: str) -> None:
        return None

    def pyarrow(self, path: str) -> tuple[fs.FileSystem, str]:
        filesystem = self._open()
        return filesystem, "/".join(part for part in (self._root.rstrip("/"), path) if part)

    def write(self, path: str, data: bytes) -> None:
        filesystem, target = self.pyarrow(path)
        if filesystem.type_name in OBJECT_STORES:
            with filesystem.open_output_stream(target, compression=None) as stream:
                stream.write(data)
            return
        parent, name = target.rsplit("/", 1) if "/" in target else ("", target)
        self._make_parent(path)
        beside = f"{parent}/{temporary_name(name)}".lstrip("/" if not parent else "")
        with filesystem.open_output_stream(beside, compression=None) as stream:
            stream.write(data)
        filesystem.move(beside, target)

    def read(self, path: str, start: int) -> bytes:
        filesystem, source = self.pyarrow(path)

        def read() -> bytes:
            if start == 0:
                with filesystem.open_input_stream(source, compression=None) as stream:
                    return bytes(stream.read())
            with filesystem.open_input_file(source) as file:
                return bytes(file.read_at(max(0, file.size() - start), start))

        return patiently(read)

    @contextmanager
    def writer(self, path: str) -> Iterator[BinaryIO]:
        filesystem, target = self.pyarrow(path)
        self._make_parent(path)
        with filesystem.open_output_stream(target, compression=None) as stream:
            yield cast(BinaryIO, _Unhurried(stream))

    @contextmanager
    def reader(self, path: str) -> Iterator[BinaryIO]:
        filesystem, source = self.pyarrow(path)
        with filesystem.open_input_file(source) as stream:
            yield io.BufferedReader(PatientFile(stream), _BUFFER)

    def size_bytes(self, path: str) -> int | None:
        size: int | None = self._info(path).size
        return size

    def move(self, path: str, to: str) -> None:
        filesystem, source = self.pyarrow(path)
        filesystem.move(source, self.pyarrow(to)[1])

    def append(self, path: str, data: bytes) -> None:
        raise StorageError(f"{self.location('')} cannot append to files: write {path!r} whole instead")

    def entries(self, path: str) -> list[Entry]:
        filesystem, directory = self.pyarrow(path)
        selector = fs.FileSelector(directory, allow_not_found=True)
        return [
            Entry(info.base_name, info.type == fs.FileType.Directory, info.size or 0)
            for info in filesystem.get_file_info(selector)
        ]

    def files(self, path: str) -> list[str]:
        filesystem, directory = self.pyarrow(path)
        selector = fs.FileSelector(directory, allow_not_found=True, recursive=True)
        found = filesystem.get_file_info(selector)
        return [info.path.removeprefix(directory).lstrip("/") for info in found if info.is_file]

    def exists(self, path: str) -> bool:
        return bool(self._info(path).type != fs.FileType.NotFound)

    def make_dir(self, path: str) -> None:
        filesystem, directory = self.pyarrow(path)
        if filesystem.type_name not in OBJECT_STORES:
            filesystem.create_dir(directory, recursive=True)

    def delete(self, path: str) -> None:
        if self.exists(path):
            filesystem, file = self.pyarrow(path)
            filesystem.delete_file(file)

    def delete_dir(self, path: str) -> None:
        if self.exists(path):
            filesystem, directory = self.pyarrow(path)
            filesystem.delete_dir(directory)

    def take(self, source: BinaryIO, path: str) -> None:
        try:
            with self.writer(path) as stream:
                while piece := source.read(_PIECE):
                    stream.write(piece)
        except BaseException:
            self.delete(path)  # closing it has made a file of what there was
            raise

    def download_dir(self, path: str, local: str | os.PathLike[str]) -> None:
        filesystem, source = self.pyarrow(path)
        patiently(lambda: fs.copy_files(source, str(local), filesystem, fs.LocalFileSystem()))

    def claim_dir(self, staged: str, path: str) -> bool:
        raise StorageError(f"{self.location('')} cannot rename directories")

    def _info(self, path: str) -> fs.FileInfo:
        filesystem, target = self.pyarrow(path)
        return filesystem.get_file_info(target)

    def _make_parent(self, path: str) -> None:
        filesystem, target = self.pyarrow(path)
        if filesystem.type_name not in OBJECT_STORES and "/" in target:
            filesystem.create_dir(target.rsplit("/", 1)[0], recursive=True)

    def _open(self) -> fs.FileSystem:
        if self._filesystem is None:
            try:
                self._filesystem, self._root = fs.FileSystem.from_uri(bounded(self._uri, self._query))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
                raise RequestError(
                    f"storage {self._uri}: not a location that pyarrow.fs opens (a path, or a URI of"
                    f" {SCHEMES}): {reason(error)}"
                ) from error
            except OSError as error:
                raise StorageError(f"storage {self._uri} cannot be reached: {reason(error)}") from error
        return self._filesystem


class _Unhurried(io.RawIOBase):
    """A file that is written no faster than it leaves."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self._ahead = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(data)
        length = memoryview(data).nbytes
        self._ahead += length
        if self._ahead >= _AHEAD_BYTES:
            self.flush()
        return length

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()
            self._ahead = 0
