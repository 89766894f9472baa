"""Where a script runs: one directory of its job, for all nodes and attempts, and after `resume`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

RECORD = ".shoal-files.json"
"""In the directory: the files that were copied there, each with its digest as it was then."""
_HALF = ".shoal-half"
"""What is being copied. One name: whoever is killed on the way leaves it, and the next one writes over it."""
_CHUNK = 1 << 20


def update_work(source: Path, work: Path, files: Iterable[str] | None = None) -> list[str]:
    """Bring a job's files into the directory where its script runs.

    What the script has made or changed there stays: a file is copied when it is not there, or when the one in
    `source` is another one than was copied last.

    Args:
        source: the directory that was submitted.
        work: made if it is not there.
        files: those that come along, paths from `source`; None takes all of them.

    Returns:
        what was copied, paths from `source`.
    """
    work.mkdir(parents=True, exist_ok=True)
    known = _read(work / RECORD)
    found = {path: digest_of(source / path) for path in sorted(_files(source) if files is None else files)}
    copied = [
        path for path, digest in found.items() if known.get(path) != digest or not (work / path).exists()
    ]
    for path in copied:
        _copy(source / path, work / path)
    # Last: whoever is killed on the way copies again what is not known here.
    _write(work / RECORD, {**known, **found})
    return copied


def digest_of(file: Path) -> str:
    """SHA-256, in hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _files(directory: Path) -> Iterator[str]:
    for path, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if name != "__pycache__"]
        for name in names:
            file = Path(path, name)
            if file.is_file() and name not in (RECORD, _HALF):  # not a pipe, nor a link that leads nowhere
                yield file.relative_to(directory).as_posix()


def _copy(source: Path, target: Path) -> None:
    """Readers see all of the old or all of the new file; its rights and times travel with it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(_HALF)
    try:
        shutil.copy2(source, beside)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _read(record: Path) -> dict[str, str]:
    try:
        known: dict[str, str] = json.loads(record.read_text())
    except FileNotFoundError:
        return {}
    return known


def _write(record: Path, files: dict[str, str]) -> None:
    beside = record.with_name(f"{record.name}.{uuid.uuid4().hex}")
    beside.write_text(json.dumps(files, indent=0, sort_keys=True))
    beside.replace(record)
