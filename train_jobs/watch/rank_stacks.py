"""Where a rank's process stands: its state, and the stacks of its threads."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from cluster.node.sessions import living

_MAIN_THREAD, _ALL_THREADS = signal.SIGUSR1, signal.SIGUSR2
"""What asks a process for the stack of its main thread, and for all of them."""
_DUMP_TIMEOUT_S = 3.0
_LOOK_S = 0.02
_THREAD = re.compile(r"[Tt]hread 0x")
_FRAME = re.compile(r'File "(.*)", line \d+ in (\S+)')
_OF_TORCH = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
"""Files of torch in which it waits for peers."""
_WAITING = {
    "train_jobs/elastic/exchange.py": ("_wait_for_end", "_wait"),
    "torch/autograd/graph.py": ("_engine_run_backward",),  # DistributedDataParallel waits below Python
    "train_jobs/rank/loop.py": ("_totals",),  # a collective of a GPU is waited for where its result is read
}
"""Other functions in which a rank waits for its peers, by file."""
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a network file system",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}


def write_stacks_when_asked() -> int:
    """Let this process write its stacks into a file of its own when a `RankStacks` asks for them.

    Returns:
        The file's descriptor in this process; the file is gone with it.
    """
    file = os.memfd_create("stacks")
    faulthandler.register(_MAIN_THREAD, file, all_threads=False)
    faulthandler.register(_ALL_THREADS, file, all_threads=True)
    return file


class RankStacks:
    """A process that has called `write_stacks_when_asked`.

    Args:
        descriptor: what that returned there.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._path = Path(f"/proc/{pid}/fd/{descriptor}")

    def state(self) -> str:
        """What the kernel says of it, in words."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
        return _STATES.get(letter, f"state {letter}")

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger keeps it from running."""
        return self.state() in (_STATES["T"], _STATES["t"])

    def is_dead(self) -> bool:
        """Whether it has ended, though whoever started it may not have heard of that yet."""
        return self.state() in ("gone", _STATES["Z"])

    def has_ended(self) -> bool:
        """Whether it has ended, and all that it had started: a script of its own, which holds the device."""
        return self.is_dead() and not living(self.pid)

    def dump(self) -> str | None:
        """The stacks of all threads, the most recent call first; also of a process that is stopped.

        What stopped it is undone for that, and it may die of it: the process is about to be killed.

        Returns:
            None where none could be had: it is dead, or does not even answer a signal.
        """
        with ExitStack() as opened:
            try:
                file = opened.enter_context(self._path.open("rb"))
            except OSError:
                return None
            # The other threads run on while the main one looks at theirs, and now and then that ends the
            # process (SIGSEGV in CPython 3.11). What a thread says of itself is safe, so it is asked first.
            main, ended = self._ask(_MAIN_THREAD, file)
            if ended:
                every, ended = self._ask(_ALL_THREADS, file)
                return every if ended else main
        return main or None

    def _ask(self, number: int, file: BinaryIO) -> tuple[str, bool]:
        """What the process writes at this signal, and whether it came to the end of it."""
        file.seek(0, os.SEEK_END)
        start, text = file.tell(), b""
        deadline = time.monotonic() + _DUMP_TIMEOUT_S
        _signal_main_thread(self.pid, number)
        with suppress(OSError):
            os.kill(self.pid, signal.SIGCONT)
        while time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            # Looked at in this order: what has begun and is in its handler no more has ended.
            ended = bool(text) and not self._is_in_handler(number)
            dead = self.is_dead()
            file.seek(start)
            text = file.read()
            if ended or dead:
                return text.decode(errors="replace"), ended
        return text.decode(errors="replace"), False

    def _is_in_handler(self, number: int) -> bool:
        """Whether the main thread is in the handler of a signal: the kernel blocks it meanwhile."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        blocked = next(line for line in status.splitlines() if line.startswith("SigBlk:"))
        return bool(int(blocked.split()[1], 16) & 1 << (number - 1))

    def kill(self) -> None:
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


def _signal_main_thread(pid: int, number: int) -> None:
    """As os.kill, but no other thread takes it: the main thread would run on while its stack is written."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc 2.30 and newer
    if tgkill is not None:
        tgkill(pid, pid, number)
        return
    with suppress(OSError):
        os.kill(pid, number)


def main_frames(stacks: str) -> list[tuple[str, str]]:
    """File and function of each frame of the main thread, the innermost first.

    Args:
        stacks: of all threads, as faulthandler writes them.
    """
    return _FRAME.findall(_THREAD.split(stacks)[-1])  # the oldest thread is the last


def waits_for_others(stacks: str) -> bool:
    """Whether the main thread stands where a rank waits for its peers: then it is another that hangs.

    Args:
        stacks: of all threads, as faulthandler writes them.
    """
    frames = [each for each in main_frames(stacks) if not each[0].endswith("/threading.py")]
    if not frames:
        return False
    file, function = frames[0]
    return any(place in file for place in _OF_TORCH) or any(
        file.endswith(place) and function in functions for place, functions in _WAITING.items()
    )
