"""What the fork server of test_fork_server.py imports and calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster.node import sessions

WAIT = "import os, sys, time; os.write(1, b'.'); time.sleep(600)"
NOBODY = 2**22 + 1
"""More than a kernel gives as the number of a process."""


def leave_two(pids: str) -> None:
    """Leave two processes behind, one in a process group of its own, and say which."""
    left = []
    for group in (None, 0):
        child = subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, process_group=group)
        assert child.stdout is not None
        child.stdout.read(1)
        left.append(child.pid)
    Path(pids).write_text(json.dumps(left))
    os._exit(3)


def end_at_once() -> None:
    """Leave nothing behind, as far as this process can tell."""


if held := os.environ.get("HELD"):  # in a server that has this imported: the kernel takes its time
    of_kernel = sessions.living
    sessions.DEATH_S = float(os.environ["DEATH_S"])
    sessions.living = lambda session: [*of_kernel(session), *([NOBODY] if Path(held).exists() else [])]
