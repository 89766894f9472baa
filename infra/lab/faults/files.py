"""Faults of files: a checkpoint that is cut short, has another bit in it, or is gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path


def truncate(directory: Path) -> None:
    """Cut the largest file in half, as a disk that filled up does."""
    file = _largest(directory)
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size // 2)


def flip(directory: Path) -> None:
    """Turn one bit over in the middle of the largest file; its size stays."""
    file = _largest(directory)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def delete(directory: Path) -> None:
    """Take away all of it."""
    shutil.rmtree(directory)


DAMAGES: dict[str, Callable[[Path], None]] = {"truncated": truncate, "flipped": flip, "deleted": delete}
"""By what has become of the checkpoint."""


def _largest(directory: Path) -> Path:
    return max((file for file in directory.iterdir() if file.is_file()), key=lambda file: file.stat().st_size)
