"""How much memory processes of this machine can still take: the machine's own, and its cgroup's bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")

_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_VERSION_2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes() -> int:
    """Bytes that can be taken without swapping or being killed for it."""
    return min([psutil.virtual_memory().available, *cgroup_rooms(CGROUPS, OWN_CGROUPS)])


def cgroup_rooms(root: Path, own: Path) -> Iterator[int]:
    """What each cgroup with a bound that this process is in leaves, innermost first.

    Pages of files count as free: they are given up where memory is short.

    Args:
        root: where cgroups are mounted.
        own: the file that says which this process is in.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _rooms(root, path, *_VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _rooms(root / "memory", path, *_VERSION_1)


def _rooms(mount: Path, path: str, limit: str, usage: str, file_pages: tuple[str, ...]) -> Iterator[int]:
    group = mount / path.lstrip("/")
    while group.is_relative_to(mount):
        try:
            # "max", and a number beyond any memory, are no bound.
            most = int((group / limit).read_text())
            used = int((group / usage).read_text())
            pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield max(0, most - used + sum(int(pages.get(name, 0)) for name in file_pages))
        except (OSError, ValueError):
            pass  # a container sees its own cgroup as the root, and the root has no bound
        group = group.parent
