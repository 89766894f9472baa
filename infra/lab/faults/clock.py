"""Faults of clocks: the wall clock of whatever is started meanwhile jumps; the machine's own stays."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import ShoalError
from infra.lab.environment import in_environment

_SOURCE = Path(__file__).with_name("wall_clock.c")
_PRELOAD = "LD_PRELOAD"
_OFFSET = "SHOAL_WALL_CLOCK"


def missing() -> str | None:
    """Why clocks cannot be moved here; None where they can."""
    if os.uname().sysname != "Linux":
        return "only the dynamic linker of Linux is known to preload it"
    return None if shutil.which("cc") else "there is no C compiler (cc) for what moves the clock"


class WallClock:
    """Moves the wall clock of every process that was started under it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """So many seconds ahead of the machine's clock from now on, or behind it."""
        with self._path.open("r+b" if self._path.exists() else "wb") as file:  # never another inode
            file.write(struct.pack("=q", seconds))


@contextmanager
def movable_clock(directory: Path) -> Iterator[WallClock]:
    """What this process starts meanwhile has a clock that can be moved; its own stays.

    Raises:
        ShoalError: the compiler fails.
    """
    library, path = directory / "wall_clock.so", directory / "wall_clock"
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ShoalError(f"{_SOURCE} cannot be compiled: {done.stderr}")
    clock = WallClock(path)
    preloaded = " ".join(each for each in (os.environ.get(_PRELOAD), str(library)) if each)
    with in_environment({_PRELOAD: preloaded, _OFFSET: str(path)}):
        yield clock
