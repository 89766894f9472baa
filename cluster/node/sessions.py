"""The processes of a session, whoever their parent is by now: one that ends may leave others behind."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

DEATH_S = 30.0
"""A kernel takes its time to end a process of much memory, or with many devices."""


def living(session: int) -> list[int]:
    """Processes of a session that have not ended; nobody may have waited yet for those that have.

    Args:
        session: the process that began it (setsid).
    """
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in processes if _session_of(pid) == session and not has_ended(pid)]


def kill(session: int) -> None:
    """Kill all processes of a session, also those that have made process groups of their own in it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)  # at once: none can fork out of this
    for pid in living(session):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Whether all threads of a process have ended: the first may have, and others still hold its devices."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


def _session_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except OSError:  # it is gone
        return None
