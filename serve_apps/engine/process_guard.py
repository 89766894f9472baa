"""A program that outlives its parent by a moment: it ends the processes that the parent leaves behind.

    python process_guard.py PARENT_PID DIRECTORY

Its standard input names processes, a line each, `PID CREATION_TIME`, as `name_of` writes them, and paths of
shared memory. When that ends, or the parent is gone however it went, those processes that are still there are
killed, with all that came of them, and the memory and the directory are removed. It is run by its path, so it
imports nothing of Shoal.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

LOOK_EVERY_S = 0.5
_STEP_S = 0.02
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python's own, which end by themselves, after they have cleaned up."""
_SHARED_MEMORY = Path("/dev/shm")
_OWN_MEMORY = ("psm_", "vllm_", "nccl-", "torch_")
"""How the names of shared memory begin that no process outside a family has a part in."""


def name_of(process: psutil.Process) -> str:
    """A process as it is told to the guard; unlike its id alone, nothing else comes to have it later."""
    return f"{process.pid} {process.create_time()!r}"


def with_descendants(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Those of the processes that run, and what came of them, but for Python's helpers."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            if process.is_running():
                found |= {process, *process.children(recursive=True)}
    return {process for process in found if _counts(process)}


def kill(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Kill processes and all that came of them; those that are there still after the timeout.

    A stopped process ends too. One that only waits to be collected by its parent has ended.
    """
    family = set(processes)
    deadline = time.monotonic() + timeout_s
    while True:
        family |= with_descendants(family)
        left = [process for process in family if _counts(process)]
        if not left or time.monotonic() > deadline:
            return left
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_STEP_S)


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """The files of shared memory that processes have open and that are theirs alone."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = Path(line.rpartition(" ")[2])
                if path.parent == _SHARED_MEMORY and path.name.startswith(_OWN_MEMORY):
                    found.add(path)
    return found


def _counts(process: psutil.Process) -> bool:
    try:
        if not process.is_running() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return False
        return not any(helper in part for part in process.cmdline() for helper in _HELPERS)
    except psutil.NoSuchProcess:
        return False


def _find(name: str) -> psutil.Process | None:
    pid, created = name.split()
    try:
        process = psutil.Process(int(pid))
        return process if process.create_time() == float(created) else None
    except psutil.NoSuchProcess:
        return None


def main(parent: int, directory: str) -> None:
    """Wait for the parent's end, or for that of the standard input, and clean up after it."""
    names = b""
    while True:
        gone = os.getppid() != parent  # before what it wrote is read: it may have ended before this began
        while select.select([0], [], [], 0 if gone else LOOK_EVERY_S)[0]:
            if not (read := os.read(0, 65536)):
                gone = True
                break
            names += read
        if gone:
            break
    # The last line may have been cut off by the parent's end.
    told = names.decode().split("\n")[:-1]
    files = {Path(name) for name in told if name.startswith("/")}
    found = [_find(name) for name in told if not name.startswith("/")]
    family = [process for process in found if process is not None]
    files |= shared_memory(with_descendants(family))
    kill(family, timeout_s=30.0)
    for file in files:
        file.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
