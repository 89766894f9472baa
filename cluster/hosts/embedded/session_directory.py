"""Where an embedded cluster's nodes keep what they need while they run: files of this machine, and short.

    /tmp/shoal-<uid>/<name>/        0700, ours: Ray's own temp dirs, and temporary files of jobs

A home may be that of other machines too.
"""

from __future__ import annotations

import os
from pathlib import Path

from cluster.hosts.short_paths import short_directory


def session_root() -> Path:
    """The directory of all embedded clusters of this user on this machine."""
    return Path(f"/tmp/shoal-{os.getuid()}")


def session_directory(name: str) -> Path:
    """The directory of one cluster.

    Raises:
        ShoalError: see `short_directory`.
    """
    return short_directory(session_root(), name)
