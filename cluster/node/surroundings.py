"""What a process has around it: what a fork can be given, and what was decided when its server imported."""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

_READ_AT_IMPORT = (
    "GLIBC_TUNABLES",
    "GOMP_",
    "HF_",
    "HUGGINGFACE_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "TRANSFORMERS_",
    "VLLM_",
)
"""How the names of variables begin that a fork would be given too late: the loader, Python or a library has
read them when it was loaded."""
_READ_LATER = {
    "HF_TOKEN",
    "OMP_NUM_THREADS",  # a fork sets its threads itself
    "PYTHONBREAKPOINT",  # when a breakpoint is come to
    "PYTHONPATH",  # a fork is given the path itself
    "PYTHONUNBUFFERED",  # a fork sees to that itself
    "PYTORCH_NVML_BASED_CUDA_CHECK",
}
_PACKAGES = ("cluster", "infra", "serve_apps", "train_jobs")
"""Shoal's own."""
_RUN_AT_START = ("sitecustomize", "usercustomize")
"""What Python imports by itself when it starts (`site`); a fork does not start."""
_ARGUMENTS, _ENVIRONMENT = 45, 47
"""Fields of /proc/PID/stat, behind the name: arg_start and env_start."""
_OWN = struct.Struct("3i")
"""struct ucred: process id, user, group."""


@dataclass(frozen=True)
class Surroundings:
    """Of a process that wants forks, or of the server that is to make them.

    Attributes:
        environment: its variables.
        path: where it looks for modules.
        directory: where it works.
        python: the interpreter, and where its packages are.
        package: which Shoal it has: a digest of the names and sizes of its files, wherever they lie.
        title: of its fork server, for people who look at processes.
    """

    environment: Mapping[str, str]
    path: Sequence[str]
    directory: str
    python: Sequence[str]
    package: str
    title: str = ""

    @classmethod
    def here(cls, variables: Mapping[str, str] = MappingProxyType({}), title: str = "") -> Surroundings:
        """Those of this process, with these variables besides."""
        return cls(
            {**os.environ, **variables},
            path_with(variables),
            os.getcwd(),
            [sys.executable, sys.prefix],
            _own_package(),
            title,
        )

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Surroundings:
        return cls(**document)

    def as_json(self) -> dict[str, Any]:
        return vars(self)

    def misfit(self, server: Surroundings, imported: Mapping[str, str]) -> str | None:
        """Why a fork of a server would not be what a process with these surroundings would be; None: it is.

        Args:
            imported: packages that the server has imported, and where from.
        """
        if list(self.python) != list(server.python):
            return f"it has another Python ({self.python[0]})"
        if self.package != server.package:
            return "it has another Shoal"
        ours, theirs = _early(self.environment), _early(server.environment)
        if differ := sorted({name for name, _ in ours.items() ^ theirs.items()}):
            return f"its environment has other {', '.join(differ)}"
        known = set(server.path)
        for place in self.path:
            if place in known:
                continue
            for name, where in _packages_in(place or self.directory):
                as_unknown = None if name in _RUN_AT_START else where
                if name not in _PACKAGES and imported.get(name, as_unknown) != where:
                    return f"it has {name} from {where}"
        return None


def path_with(variables: Mapping[str, str]) -> list[str]:
    """Where a process looks for modules that has what this one has, and these variables besides."""
    added = [place for place in variables.get("PYTHONPATH", "").split(os.pathsep) if place]
    return [*added, *(place for place in sys.path if place not in added)]


@cache
def _own_package() -> str:
    """See `Surroundings.package`."""
    root, found = Path(__file__).parents[2], hashlib.sha256()
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            found.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
    return found.hexdigest()


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read at an import."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }


def _packages_in(directory: str) -> list[tuple[str, str]]:
    """Names of the packages and modules in a directory of the path, and where they are."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    found = []
    for name in names:
        where = os.path.join(directory, name)
        if name.endswith(".py"):
            found.append((name[:-3], os.path.realpath(where)))
        elif os.path.exists(os.path.join(where, "__init__.py")):
            found.append((name, os.path.realpath(where)))
    return found


def imported_packages() -> dict[str, str]:
    """The packages and modules that this process has imported, and where from; those of Python left out."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." in name or name == "__main__" or not file:
            continue
        place = Path(os.path.realpath(file))
        found[name] = str(place.parent if place.stem == "__init__" else place)
    return found


def show_environment(environment: Mapping[str, str]) -> None:
    """Let others see this environment as that of this process (/proc/PID/environ): of a fork they would see
    its server's, and take it for another node's or cluster's.

    The kernel shows what a process has at the place where its first environment was; what does not fit there
    is left out, and Shoal's own marks come first. To be called when nothing uses that environment any more.
    """
    begin, room = _shown_at(_ENVIRONMENT)
    shown = b""
    for name in sorted(environment, key=lambda name: (not name.startswith("SHOAL_"), name)):
        entry = os.fsencode(f"{name}={environment[name]}") + b"\0"
        if len(shown) + len(entry) <= room:
            shown += entry
    if room:
        ctypes.memmove(begin, shown.ljust(room, b"\0"), room)


def show_title(title: str) -> None:
    """Let others see this as the command line of this process, of which a fork has its server's."""
    begin, room = _shown_at(_ARGUMENTS)
    if room:
        ctypes.memmove(begin, os.fsencode(title)[: room - 1].ljust(room, b"\0"), room)


def change_title(begins: str, instead: str) -> None:
    """Let the command line of this process begin otherwise, where it begins like this."""
    try:
        title = Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    except OSError:
        return
    if title.startswith(begins):
        show_title(instead + title.removeprefix(begins))


def _shown_at(field: int) -> tuple[int, int]:
    """Where in its memory the kernel shows something of this process, and how many bytes; none: it does not.

    Args:
        field: of /proc/PID/stat, behind the name: where that begins; the next is where it ends.
    """
    try:
        numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(numbers[field]), int(numbers[field + 1])
    except (OSError, IndexError, ValueError):
        return 0, 0
    return begin, max(0, end - begin)


def address_here(cluster: str) -> str:
    """Where the fork server of a cluster listens on this machine: a name of Linux's abstract namespace.

    It leaves no file behind, however its server ends. What runs beside this process in another container or
    another cgroup does not find it: a fork would be in the server's.

    Args:
        cluster: what tells the cluster from others on this machine.
    """
    beside = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid")]
    with suppress(OSError):  # a kernel without them
        beside.append(Path("/proc/self/cgroup").read_text())
    name = hashlib.sha256("\n".join([cluster, str(os.getuid()), *beside]).encode()).hexdigest()
    return f"\0shoal-forks-{name[:32]}"


def is_own(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user and of this container; others may find the name too."""
    pid, user, _ = _OWN.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _OWN.size))
    return pid > 0 and user == os.getuid()
