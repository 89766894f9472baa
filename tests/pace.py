"""What work costs this processor, in a unit that does not depend on how fast the machine is just now."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

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


def _processor_seconds(do: Callable[[], object]) -> float:
    began = time.process_time()
    do()
    return time.process_time() - began


def _loop() -> None:
    kept = {}
    for step in range(STEPS):
        kept[str(step % 1000)] = step
