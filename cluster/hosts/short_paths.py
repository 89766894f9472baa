"""Directories that are short enough for the unix sockets that Ray makes in them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cluster.errors import ShoalError

SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket on Linux."""
RAY_SOCKET_BYTES = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/dash_MetricsHead")
"""What Ray appends to a node's temp dir for its longest socket, with the longest process id."""
NODE_BYTES = len("/n999")
"""What we append to a cluster's directory for a node's temp dir."""


def short_directory(root: Path, name: str) -> Path:
    """The directory of one cluster; a name that would make socket paths too long is shortened by its hash.

    Raises:
        ShoalError: not even the shortened name fits under this root.
    """
    room = SOCKET_PATH_BYTES - NODE_BYTES - RAY_SOCKET_BYTES - len(os.fsencode(root)) - len("/")
    if len(name) <= room:
        return root / name
    digest = "~" + hashlib.sha256(name.encode()).hexdigest()[:8]  # `~` is in no name, so it meets none
    if len(digest) > room:
        raise ShoalError(
            f"the directory {root} is too long: Ray's unix sockets below it would need more than"
            f" {SOCKET_PATH_BYTES} bytes of path, which is all the kernel allows"
        )
    return root / (name[: room - len(digest)] + digest)
