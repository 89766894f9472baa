"""What travels with a job, as one file."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from cluster.errors import RequestError
from train_jobs.driver.package import Package

COMPRESSION = 1
"""Of gzip: fast, since the way is mostly short."""
_CHUNK = 1 << 20


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


@contextmanager
def unpacked(file: IO[bytes] | None) -> Iterator[Package]:
    """The files of a packed package, in a directory that goes at the end; without a file there are none.

    Raises:
        RequestError: it is cut off, or holds what no package may.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-package-") as directory:
        base = Path(directory)
        if file is not None:
            file.seek(0)
            try:
                with tarfile.open(fileobj=file, mode="r:gz") as archive:
                    # `data`: files and directories, below the base; no links to elsewhere, no devices.
                    archive.extractall(base, filter="data")
            except (tarfile.TarError, EOFError, OSError) as error:
                raise RequestError(f"the package cannot be unpacked: {error}") from error
        found = sorted(path for path in base.rglob("*") if path.is_file())
        files = tuple(path.relative_to(base).as_posix() for path in found)
        yield Package(base, files, sum(path.stat().st_size for path in found))
