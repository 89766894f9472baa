"""Processes that get a part of a core each, through Linux's control groups (1 or 2); needs root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 20_000
"""Short beside a step of an engine, so that a quota looks like a slower core and not like pauses."""
ROOT = Path("/sys/fs/cgroup")


def _group(name: str, cores: float) -> Path:
    quota = round(cores * PERIOD_US)
    first_version = ROOT / "cpu"
    if (first_version / "cpu.cfs_quota_us").exists():
        group = first_version / name
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota))
        return group
    (ROOT / "cgroup.subtree_control").write_text("+cpu")
    group = ROOT / name
    group.mkdir()
    (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    return group


@contextmanager
def limited(pids: Iterable[int], cores: float) -> Iterator[None]:
    """Give each of these processes so many cores, its threads and later children included.

    Raises:
        OSError: control groups cannot be made here.
    """
    groups: list[Path] = []
    try:
        for pid in pids:
            groups.append(_group(f"shoal-benchmark-{os.getpid()}-{pid}", cores))
            (groups[-1] / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for group in groups:
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it may have ended
                    (group.parent / "cgroup.procs").write_text(pid)
            group.rmdir()
