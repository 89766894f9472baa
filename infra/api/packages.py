"""What travels with a job, on its way: packed where the job is submitted, kept on the head until then."""

from __future__ import annotations

import hashlib
import re
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
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
    """Packages that were sent, in files without names, which go with this process however it ends.

    Not tied to a thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[IO[bytes], float]] = {}
        """By digest, with when it came."""

    async def take(self, digest: str, chunks: AsyncIterator[bytes]) -> int:
        """Keep a package; its size in bytes.

        Args:
            digest: its SHA-256, in hexadecimal digits.

        Raises:
            RequestError: it is not what the digest says.
            ShoalError: there is no room for it.
        """
        if not _DIGEST.fullmatch(digest):
            raise RequestError("a package is named by its SHA-256: 64 hexadecimal digits, in lower case")
        seen, size = hashlib.sha256(), 0
        try:
            with ExitStack() as until_it_is_whole:
                file = until_it_is_whole.enter_context(tempfile.TemporaryFile())
                async for chunk in chunks:
                    file.write(chunk)
                    seen.update(chunk)
                    size += len(chunk)
                file.flush()
                if seen.hexdigest() != digest:
                    raise RequestError(
                        f"what was sent is {seen.hexdigest()[:12]}…, not {digest[:12]}…; send it again"
                    )
                until_it_is_whole.pop_all()
        except OSError as error:
            raise ShoalError(f"the head has no room for this package: {error}") from error
        now = time.monotonic()
        with self._lock:
            self._kept[digest] = file, now
            # Whoever unpacks one now has it open still.
            self._kept = {key: kept for key, kept in self._kept.items() if now - kept[1] <= KEPT_S}
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
                with self._lock:  # several may want one file
                    kept = self._kept.get(digest)
                    if kept is None:
                        raise UnknownPackageError(f"no package {digest[:12]}… is here; send it first")
                    kept[0].seek(0)
                    _unpack(kept[0], base)
            found = sorted(path for path in base.rglob("*") if path.is_file())
            files = tuple(path.relative_to(base).as_posix() for path in found)
            yield Package(base, files, sum(path.stat().st_size for path in found))

    def drop(self, digest: str | None) -> None:
        """Forget a package that was taken."""
        if digest is not None:
            with self._lock:
                self._kept.pop(digest, None)


def _unpack(file: IO[bytes], base: Path) -> None:
    try:
        with tarfile.open(fileobj=file, mode="r:gz") as archive:
            # `data`: regular files and directories, below the base; no links to elsewhere, no devices.
            archive.extractall(base, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise RequestError(f"the package cannot be unpacked: {error}") from error
