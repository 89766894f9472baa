"""Files of this machine, written so that a kill or a loss of power leaves the old or the new, never half."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import BinaryIO

HIDDEN = "."
"""Names that start with it (half-written files, leftovers, `.gitignore`) are no content of the storage."""


def flush_dir(path: Path) -> None:
    """Make the names in a directory survive a loss of power."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_name(name: str) -> str:
    """A hidden name that nobody else takes, for what becomes `name` once it is whole."""
    return f"{HIDDEN}{name[:100]}.{uuid.uuid4().hex}"


def write_whole(target: Path, data: bytes) -> None:
    """Write a file: readers, and whoever comes after a crash, see all of the old or all of the new one."""
    beside = target.with_name(temporary_name(target.name))
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    flush_dir(target.parent)


def copy_whole(source: BinaryIO, target: Path) -> None:
    """Copy what a reader has to its end, in the same way."""
    beside = target.with_name(temporary_name(target.name))
    try:
        with open(beside, "xb") as writer:
            shutil.copyfileobj(source, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    flush_dir(target.parent)
