"""Waiting for what a fault leads to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cluster.errors import ShoalError

_LOOK_S = 0.05


def wait_for(condition: Callable[[], Any], otherwise: str, timeout_s: float = 150.0) -> Any:
    """Wait until a condition holds; returns what it returned.

    Raises:
        ShoalError: it did not in time; `otherwise` says what is missing.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise ShoalError(f"{otherwise} within {timeout_s:.0f} s")
        time.sleep(_LOOK_S)
    return value
