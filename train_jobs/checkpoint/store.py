"""The checkpoints of a run on mounted storage: complete or not there, and the last few kept."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

COMMIT_MARKER = "committed.json"
"""Written last; a checkpoint without it is never loaded. It lists the checkpoint's files and their sizes."""

_NAME = re.compile(r"step-(\d{8})")


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


class CheckpointStore:
    """The directory `checkpoints/` of one run, on a file system that every rank's node mounts.

    Ranks write into the checkpoint's own directory; rank 0 commits it by writing the marker.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / checkpoint_name(step)

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return sorted(step for step in self._all_steps() if self.is_complete(step))

    def newest(self) -> int | None:
        steps = self.steps()
        return steps[-1] if steps else None

    def prepare(self, step: int) -> None:
        """Make room for a checkpoint that is about to be written; one rank calls this, before any writes."""
        self._delete(step)
        self.path(step).mkdir(parents=True)

    def commit(self, step: int, facts: dict[str, Any], keep: int) -> None:
        """All ranks have written: the checkpoint counts from here on, and the oldest beyond `keep` go."""
        directory = self.path(step)
        files = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
        staged = directory / f"{COMMIT_MARKER}.tmp"
        with staged.open("w") as file:
            json.dump({"step": step, **facts, "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        staged.rename(directory / COMMIT_MARKER)
        _sync_directory(directory)
        for old in self.steps()[:-keep]:
            self._delete(old)

    def drop_incomplete(self) -> list[int]:
        """Delete what was left half-written by ranks that died; returns the steps."""
        left = sorted(step for step in self._all_steps() if not self.is_complete(step))
        for step in left:
            self._delete(step)
        return left

    def is_complete(self, step: int) -> bool:
        """The marker is there, and every file it lists has the size it lists."""
        directory = self.path(step)
        try:
            files = json.loads((directory / COMMIT_MARKER).read_text())["files"]
            return all((directory / name).stat().st_size == size for name, size in files.items())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _delete(self, step: int) -> None:
        # The marker goes first: a deletion that is cut off must not leave what looks like a whole checkpoint.
        (self.path(step) / COMMIT_MARKER).unlink(missing_ok=True)
        if self.path(step).exists():
            shutil.rmtree(self.path(step))

    def _all_steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return [
            int(found.group(1)) for path in self.directory.iterdir() if (found := _NAME.fullmatch(path.name))
        ]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
