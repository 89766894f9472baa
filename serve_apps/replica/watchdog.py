"""Ends a process that hangs: a small process beside it, which expects to hear of it again and again.

A process that stands still cannot end itself, and what others know of it comes late: Serve takes minutes to
give up a replica that does not answer. This works without anybody else, the controllers included.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

TICK_S = 0.5


class Watchdog:
    """Kills the process that made it when that does not call `beat` for so long.

    Args:
        timeout_s: seconds of silence. They are counted by the watchdog's own steps, so that a machine that
            stood still as a whole is no reason.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._start()

    def beat(self) -> None:
        """Say that this process lives; a watchdog that was killed is replaced."""
        try:
            os.write(self._pipe, b".")
        except BlockingIOError:
            pass  # it has enough to read
        except BrokenPipeError:
            self.stop()
            self._start()

    def stop(self) -> None:
        """End the watch."""
        os.close(self._pipe)
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        theirs, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        # This file alone, without site-packages: it starts in milliseconds and takes little memory.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(theirs), str(os.getpid()), str(self._timeout_s)],
            pass_fds=(theirs,),
            stdin=subprocess.DEVNULL,
            # What is sent to this process's group does not end it first.
            start_new_session=True,
        )
        os.close(theirs)


async def show_life(timeout_s: float) -> None:
    """Have this process killed when its event loop stands still for so long; runs until cancelled."""
    # Not at the top: the small process loads this file, too.
    import asyncio

    watchdog = Watchdog(timeout_s)
    try:
        while True:
            watchdog.beat()
            await asyncio.sleep(TICK_S)
    finally:
        watchdog.stop()


def watch(pipe: int, pid: int, timeout_s: float) -> None:
    """Kill the process `pid`, the parent of this one, after so many seconds without a byte from the pipe."""
    silent_s = 0.0
    while silent_s < timeout_s:
        if not select.select([pipe], [], [], TICK_S)[0]:
            silent_s += TICK_S
        elif os.read(pipe, 4096):
            silent_s = 0.0
        else:
            return  # it has ended, or wants no watch any more
    if os.getppid() == pid:
        print(f"process {pid} was silent for {timeout_s:g} s and is killed", file=sys.stderr, flush=True)
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
