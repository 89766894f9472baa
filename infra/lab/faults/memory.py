"""A limit on the memory of processes, by a control group: the kernel kills what goes beyond it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_ROOM_BYTES = 256 * 2**20
_GONE_S = 10.0
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def missing() -> str | None:
    """Why no limit can be set here; None where it can."""
    if os.geteuid() != 0:
        return "control groups are root's"
    parent = _parent()
    if parent is None:
        return "this machine has no control group for memory"
    try:
        probe = parent / f"shoal-{secrets.token_hex(4)}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:  # in a container they are often read-only
        return f"no control group can be made: {error}"
    return None


def _parent() -> Path | None:
    if (_V1 / "cgroup.procs").exists():
        return _V1
    subtree = _V2 / "cgroup.subtree_control"
    return _V2 if subtree.exists() and "memory" in subtree.read_text().split() else None


class Limit:
    """A control group that is there for the length of a `with`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def put(self, process: psutil.Process) -> None:
        """Let a process have some memory more than it has now, and no more. What it had is not counted."""
        name = "memory.limit_in_bytes" if self.directory.parent == _V1 else "memory.max"
        (self.directory / name).write_text(str(_ROOM_BYTES))
        (self.directory / "cgroup.procs").write_text(str(process.pid))


@contextmanager
def limited() -> Iterator[Limit]:
    """A limit for processes; see `missing`."""
    parent = _parent()
    assert parent is not None, "it was asked whether there is one"
    directory = parent / f"shoal-{secrets.token_hex(4)}"
    directory.mkdir()
    try:
        yield Limit(directory)
    finally:
        deadline = time.monotonic() + _GONE_S
        while directory.exists() and time.monotonic() < deadline:
            with suppress(OSError):  # whoever was killed in it is not yet gone
                directory.rmdir()
            time.sleep(0.02)
