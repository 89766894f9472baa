"""Where a rank's process stands: its state, and the stacks of its threads."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_DUMP_TIMEOUT_S = 3.0
_LOOK_S = 0.05
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a network file system",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}


class RankStacks:
    """A process that writes its stacks into a file of its own at a SIGUSR1 (faulthandler).

    Args:
        descriptor: of that file, in the process.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._file = Path(f"/proc/{pid}/fd/{descriptor}")

    def state(self) -> str:
        """What the kernel says of it, in words."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
        return _STATES.get(letter, f"state {letter}")

    def dump(self) -> str:
        """The stacks of all threads, the most recent call first; also of a process that is stopped.

        What stopped it is undone for that: the process is about to be killed.
        """
        with suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
            os.kill(self.pid, signal.SIGCONT)
        text, deadline = "", time.monotonic() + _DUMP_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            try:
                before, text = text, self._file.read_text(errors="replace")
            except OSError:
                break
            if text and text == before:
                break
        return text or "no stack could be had: the process does not even answer a signal"

    def kill(self) -> None:
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
