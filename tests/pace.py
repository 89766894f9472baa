"""What work costs this processor, in a unit that does not depend on how fast the machine is just now."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable

import psutil

STEPS = 200_000
"""Of the loop that is the unit: some 26 ms on the machines where the bounds of tests were measured."""


def loops(do: Callable[[], object], tries: int = 3) -> float:
    """The least processor time of `do` among the tries, as a multiple of that of a fixed loop.

    A loop runs before each try, so that both meet the machine as it is. What the garbage collector does for
    the tests before is in neither.
    """
    gc.disable()
    try:
        pairs = [(_processor_seconds(_loop), _processor_seconds(do)) for _ in range(tries)]
    finally:
        gc.enable()
    return min(work for _, work in pairs) / min(loop for loop, _ in pairs)


class Unit:
    """The same loop for work of another process: what one costs now, and at the end of what is measured.

    The slower of the two counts, since the machine may have become slower meanwhile.
    """

    def __init__(self) -> None:
        self._seconds = _thread_seconds(_loop)

    def loops(self, seconds: float) -> float:
        """Processor seconds (`used_s`) since this unit was made, in loops."""
        self._seconds = max(self._seconds, _thread_seconds(_loop))
        return seconds / self._seconds


def used_s(process: psutil.Process) -> float:
    """What a process has used of the processor so far, in seconds of this machine: only for Unit.loops."""
    times = process.cpu_times()
    return float(times.user + times.system)


def used_by_children_s() -> float:
    """The same of all processes that this one started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _thread_seconds(do: Callable[[], object]) -> float:
    began = time.thread_time()
    do()
    return time.thread_time() - began


def _processor_seconds(do: Callable[[], object]) -> float:
    began = time.process_time()
    do()
    return time.process_time() - began


def _loop() -> None:
    kept = {}
    for step in range(STEPS):
        kept[str(step % 1000)] = step
