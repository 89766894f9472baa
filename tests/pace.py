"""What work costs this processor, in a unit that does not depend on how fast the machine is just now."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from statistics import median

import psutil

STEPS = 200_000
"""Of the loop that is the unit."""
USUAL_S = 0.026
"""What it takes on the machines where the bounds of tests were measured."""


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


def at_most(seconds: float, loops: float) -> bool:
    """Whether seconds of other processes are no more than so many of the same loop.

    What a loop usually takes counts, and where that is not enough, what it takes now: the median of a few,
    since the best moment of a slow minute is not what the others had.
    """
    return seconds <= loops * USUAL_S or seconds <= loops * median(_thread_seconds(_loop) for _ in range(7))


def used_s(process: psutil.Process) -> float:
    """What a process has used of the processor so far: only for at_most."""
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
