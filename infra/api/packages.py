"""What was sent to travel with jobs: kept on the head until one wants it."""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

from cluster.errors import RequestError, ShoalError
from train_jobs.driver.package import Package
from train_jobs.driver.packing import unpacked

KEPT_S = 3600.0
"""A package that nobody takes is deleted after that."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnknownPackageError(RequestError):
    """No package of this digest is here; it has to be sent (again)."""


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
        with ExitStack() as opened:
            file = None
            with self._lock:  # several may want one file
                if digest is not None:
                    if digest not in self._kept:
                        raise UnknownPackageError(f"no package {digest[:12]}… is here; send it first")
                    file, _ = self._kept[digest]
                package = opened.enter_context(unpacked(file))
            yield package

    def drop(self, digest: str | None) -> None:
        """Forget a package that was taken."""
        if digest is not None:
            with self._lock:
                self._kept.pop(digest, None)
