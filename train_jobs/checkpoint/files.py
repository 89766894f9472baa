"""The files of checkpoints in a run's storage, as torch.distributed.checkpoint reads and writes them."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cluster.files.backend import MissingError
from cluster.files.storage import Storage
from train_jobs.checkpoint.manifest import FileFact, Manifest, write_manifest

_BLOCK = 1 << 20
AnyPath = str | os.PathLike[str]


class StorageFileSystem(FileSystemBase):
    """What torch's reader and writer need, over the project's storage; digests what is written."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.written: dict[str, FileFact] = {}
        """By path: every file that was written through here."""

    @contextmanager
    def create_stream(self, path: AnyPath, mode: str) -> Generator[io.IOBase, None, None]:
        name = os.fspath(path)
        if mode == "rb":
            with self.storage.reader(name) as stream:
                yield stream  # type: ignore[misc]  # a file as good as any
            return
        with self.storage.writer(name) as stream:
            digesting = _Digesting(stream)
            try:
                yield digesting
            except RuntimeError:
                # torch's archive names a position that it did not expect; the stream knows why.
                if digesting.error is not None:
                    raise digesting.error from None
                raise
            self.written[name] = digesting.fact()

    def concat_path(self, path: AnyPath, suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def init_path(self, path: AnyPath) -> str:
        return os.fspath(path)

    def rename(self, path: AnyPath, new_path: AnyPath) -> None:
        self.storage.move(os.fspath(path), os.fspath(new_path))
        self.written[os.fspath(new_path)] = self.written.pop(os.fspath(path))

    def mkdir(self, path: AnyPath) -> None:
        self.storage.make_dir(os.fspath(path))

    def exists(self, path: AnyPath) -> bool:
        return self.storage.exists(os.fspath(path))

    def rm_file(self, path: AnyPath) -> None:
        self.storage.delete(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        return True


class _Digesting(io.RawIOBase):
    """A stream that passes on what is written, and remembers its size and digest."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._size = 0
        self.error: OSError | None = None
        """What first kept it from being written."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        with self._remembering():
            self._stream.write(data)
        length = memoryview(data).nbytes
        self._size += length
        return length

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        if not self._stream.closed:
            with self._remembering():
                self._stream.flush()

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self.flush()  # the storage closes the file itself, once its context ends

    def fact(self) -> FileFact:
        return FileFact(self._size, self._digest.hexdigest())


@dataclass(frozen=True)
class _DigestedResult(WriteResult):
    """A write's result, with the files that its rank has written: it travels to the coordinator."""

    files: Mapping[str, FileFact]


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes one checkpoint; it counts once the coordinator has written its manifest, which comes last.

    Args:
        directory: of the checkpoint, in the storage.
        facts: what the manifest says beside the files.
    """

    def __init__(self, storage: Storage, directory: str, facts: Mapping[str, Any]) -> None:
        # Where a file can be flushed to the disk it is: a marker must not survive what it vouches for.
        super().__init__(directory, sync_files=storage.appendable)
        self.fs: StorageFileSystem = StorageFileSystem(storage)  # type: ignore[assignment]
        self.path = directory
        self.facts = facts

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        files = dict(self.fs.written)
        digested: Future[list[WriteResult]] = Future()
        digested.set_result(
            [_DigestedResult(each.index, each.size_in_bytes, each.storage_data, files) for each in results]
        )
        return digested

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        files = dict(self.fs.written)
        for of_rank in results:
            for result in of_rank[:1]:  # all of a rank's results carry the same
                assert isinstance(result, _DigestedResult)
                files |= result.files
        prefix = f"{self.path}/"
        named = {path.removeprefix(prefix): fact for path, fact in sorted(files.items())}
        write_manifest(self.fs.storage, str(self.path), Manifest(named, dict(self.facts)))


class CheckpointReader(dcp.FileSystemReader):
    """Reads one checkpoint."""

    def __init__(self, storage: Storage, directory: str) -> None:
        super().__init__(directory)
        self.fs = StorageFileSystem(storage)  # type: ignore[assignment]
        self.path = directory


def digest_of(storage: Storage, path: str) -> FileFact:
    """Size and digest of a file as it is now.

    Raises:
        MissingError: there is no such file.
    """
    digest, size = hashlib.sha256(), 0
    with storage.reader(path) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileFact(size, digest.hexdigest())


def damage(
    storage: Storage, directory: str, manifest: Manifest, part: tuple[int, int] = (0, 1)
) -> str | None:
    """What is wrong with the files of a checkpoint, as a sentence; None when they are as they were written.

    Args:
        part: (index, number): look at this share of the files only.

    Raises:
        StorageError: the storage does not answer, which tells nothing of the files.
    """
    index, number = part
    for name, fact in list(manifest.files.items())[index::number]:
        try:
            found = digest_of(storage, f"{directory}/{name}")
        except MissingError as error:
            return str(error)
        if found.size_bytes != fact.size_bytes:
            return f"{name} has {found.size_bytes} bytes, {fact.size_bytes} were written"
        if found.digest != fact.digest:
            return f"{name} is not what was written: its digest is another"
    return None
