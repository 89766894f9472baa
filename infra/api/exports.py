"""Checkpoints as models through the control API: made on the head, and sent as they are read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage

_CHUNK = 1 << 20
_LAST_LINES = 5


def export_on_head(storage: Storage, job: str, step: int | None, folder: Path) -> tuple[int, Path]:
    """Write the model of a checkpoint into a temporary directory, which is the caller's to remove; the step,
    and the model.

    Args:
        step: None takes the newest.
        folder: where a task of the user's lies.

    Raises:
        RequestError: there is no such checkpoint.
        ShoalError: it is damaged, or its task fails.
    """
    place = Path(tempfile.mkdtemp(prefix="shoal-export-"))
    asked = {"storage": storage.location, "job": job, "step": step, "folder": str(folder)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "infra.api.export_process"],
            input=json.dumps({**asked, "directory": str(place / "model")}),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = "\n  ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
            raise ShoalError(f"{job} could not be exported:\n  {last}")
        result = json.loads(done.stdout.splitlines()[-1])
        if "failed" in result:
            raise (RequestError if result["request"] else ShoalError)(result["failed"])
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return result["step"], place / "model"


def tar_of(directory: Path) -> Iterator[bytes]:
    """A directory's files as a tar archive, piece by piece. The directory above goes at the end, or when
    nobody wants more."""
    pieces = _pieces(directory)
    first = next(pieces)  # what has begun is ended, too, where nobody asks for the rest
    return chain([first], pieces)


def _pieces(directory: Path) -> Iterator[bytes]:
    try:
        for path in sorted(directory.rglob("*")):
            if not path.is_file():
                continue
            member = tarfile.TarInfo(path.relative_to(directory).as_posix())
            member.size, member.mtime = path.stat().st_size, int(path.stat().st_mtime)
            yield member.tobuf(tarfile.PAX_FORMAT)
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
            yield bytes(-member.size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)
    finally:
        shutil.rmtree(directory.parent, ignore_errors=True)
