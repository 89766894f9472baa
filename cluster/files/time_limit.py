"""Asking what may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from cluster.errors import ShoalError

T = TypeVar("T")


def within(timeout_s: float, ask: Callable[[], T], otherwise: T) -> T:
    """What is answered within a time; `otherwise` where it is not, or only a ShoalError is.

    Who asks too long goes on in a thread that nobody waits for.
    """
    found: list[T] = []

    def run() -> None:
        with suppress(ShoalError):
            found.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else otherwise
