"""What travels with a job, on its way: packed where the job is submitted, kept on the head until then."""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from cluster.errors import RequestError, ShoalError
from train_jobs.driver.package import Package

KEPT_S = 3600.0
"""A package that nobody takes is deleted after that."""
COMPRESSION = 1
"""Of gzip: fast, since the way is mostly short."""
_CHUNK = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnknownPackageError(RequestError):
    """No package of this digest is here; it has to be sent (again)."""


def pack(package: Package, file: BinaryIO) -> str:
    """Write the files of a package, with their rights and times; the SHA-256 of what was written.

    What links lead to is packed in their stead, so that it means the same elsewhere.
    """
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=COMPRESSION, dereference=True) as archive:
        for path in package.files:
            archive.add((package.base / path).resolve(), arcname=path, recursive=False, filter=_anonymous)
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


class Packages:
    """Packages that were sent. Not tied to a thread.

    Args:
        directory: where they are kept; made when it is needed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()

    async def take(self, digest: str, chunks: AsyncIterator[bytes]) -> int:
        """Keep a package; its size in bytes.

        Args:
            digest: its SHA-256, in hexadecimal digits.

        Raises:
            RequestError: it is not what the digest says.
            ShoalError: there is no room for it.
        """
        target = self._path(digest)
        self._forget_old()
        seen, size = hashlib.sha256(), 0
        descriptor, name = tempfile.mkstemp(dir=self._directory, prefix=".half-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                async for chunk in chunks:
                    file.write(chunk)
                    seen.update(chunk)
                    size += len(chunk)
            if seen.hexdigest() != digest:
                raise RequestError(
                    f"what was sent is {seen.hexdigest()[:12]}…, not {digest[:12]}…; send it again"
                )
            os.replace(name, target)
        except OSError as error:
            raise ShoalError(f"the head has no room for this package: {error}") from error
        finally:
            Path(name).unlink(missing_ok=True)
        return size

    @contextmanager
    def opened(self, digest: str | None) -> Iterator[Package]:
        """The files of a package, in a directory that goes at the end; without a digest there are none.

        Raises:
            UnknownPackageError: it is not here.
            RequestError: it holds what no package may.
        """
        with tempfile.TemporaryDirectory(prefix="shoal-package-") as directory:
            base = Path(directory)
            if digest is not None:
                path = self._path(digest)
                if not path.exists():
                    raise UnknownPackageError(f"no package {digest[:12]}… is here; send it first")
                with path.open("rb") as file:
                    _unpack(file, base)
            found = sorted(path for path in base.rglob("*") if path.is_file())
            files = tuple(path.relative_to(base).as_posix() for path in found)
            yield Package(base, files, sum(path.stat().st_size for path in found))

    def drop(self, digest: str | None) -> None:
        """Forget a package that was taken."""
        if digest is not None:
            self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise RequestError("a package is named by its SHA-256: 64 hexadecimal digits, in lower case")
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory / digest

    def _forget_old(self) -> None:
        with self._lock:
            for path in self._directory.iterdir():
                try:
                    if time.time() - path.stat().st_mtime > KEPT_S:
                        path.unlink()
                except FileNotFoundError:  # somebody has taken it
                    continue


def _unpack(file: IO[bytes], base: Path) -> None:
    try:
        with tarfile.open(fileobj=file, mode="r:gz") as archive:
            # `data`: regular files and directories, below the base; no links to elsewhere, no devices.
            archive.extractall(base, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise RequestError(f"the package cannot be unpacked: {error}") from error
