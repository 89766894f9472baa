"""Waiting in tests for what other processes do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

_LOOK_S = 0.2


def wait_for(condition: Callable[[], Any], otherwise: str, timeout_s: float) -> float:
    """Wait until a condition holds; how many seconds that took, which are printed too.

    Args:
        otherwise: what is the case when it does not hold in time.
    """
    began, pause = time.monotonic(), threading.Event()
    while not condition():
        assert time.monotonic() - began < timeout_s, otherwise
        pause.wait(_LOOK_S)
    took_s = time.monotonic() - began
    print(f"{otherwise}: no, it took {took_s:.1f} s")
    return took_s
