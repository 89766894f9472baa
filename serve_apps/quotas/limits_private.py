"""What is private in the `limits` library: where it reads the time.

It counts by the wall clock, which people and time servers set: one that is put forward gives a tenant another
minute at once. Here it counts by a clock that only goes forward, at its own pace.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

from limits.aio import strategies
from limits.aio.storage import memory

_STEADY = SimpleNamespace(time=time.monotonic)


def count_by_the_steady_clock() -> None:
    """Have the library's limiters in memory count by `time.monotonic`, in all of this process."""
    for module in (memory, strategies):
        module.time = _STEADY  # type: ignore[attr-defined]
