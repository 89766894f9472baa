"""How much memory processes take, pages that they share with others counted by their share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import psutil


def memory_of(pids: Iterable[int]) -> int:
    """Bytes of memory that processes take; those that are gone take none."""
    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_full_info().pss
    return total


def memory_of_owner() -> int:
    """The same of all that this process's owner has here: the fork server that has forked this process, and
    whatever came of that."""
    with suppress(psutil.Error):
        server = psutil.Process(os.getppid())
        return memory_of([server.pid, *(each.pid for each in server.children(recursive=True))])
    return memory_of([os.getpid()])
