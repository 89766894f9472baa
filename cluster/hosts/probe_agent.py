"""What looks at a node from within: nothing but Python and Ray, since nothing else is known to be there.

It travels to the node by value, so that a node without Shoal can say that it is one.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

PACKAGES = ("shoal", "ray", "torch")
_CONNECT_S = 5.0
_SMI_S = 20.0


class ProbeAgent:
    """An actor on the node it looks at, for as long as the looking takes."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def facts(self) -> dict[str, Any]:
        """python, executable; the versions of PACKAGES (None where one is not installed); free_bytes and
        size_bytes of the disk with Ray's directory; gpus and driver (None where no NVIDIA driver says)."""
        import ray

        directory = ray.get_runtime_context().get_temp_dir()
        disk = shutil.disk_usage(directory)
        gpus, driver = _gpus()
        return {
            "python": platform.python_version(),
            "executable": sys.executable,
            "host": socket.gethostname(),
            "packages": {name: _version(name) for name in PACKAGES},
            "directory": directory,
            "free_bytes": disk.free,
            "size_bytes": disk.total,
            "gpus": gpus,
            "driver": driver,
        }

    def name_lookup_s(self, address: str) -> float:
        """How long it takes to say what an address is called, or that nobody knows."""
        began = time.monotonic()
        with suppress(OSError):
            socket.getnameinfo((_mapped(address), 0), 0)
        return time.monotonic() - began

    def clock(self) -> float:
        """Unix time."""
        return time.time()

    def write(self, storage: str, name: str, make: bool) -> str | None:
        """Write a small file below a storage; what is wrong with that, if anything.

        Args:
            make: a local directory that is not there is made.
        """
        try:
            from cluster.files.storage import Storage

            place = Storage(storage)
            local = place.local_path()
            if local is not None and not make and not local.is_dir():
                return "there is no such directory on it; is it mounted there?"
            place.write_bytes(name, b"seen")
        except Exception as error:  # noqa: BLE001  (whatever it is, the node does not do)
            return str(error).splitlines()[0] if str(error) else type(error).__name__
        return None

    def reads(self, storage: str, names: list[str], wait_s: float) -> list[str]:
        """Those of these files that it does not see, once it has had time to."""
        try:
            from cluster.files.storage import Storage

            place = Storage(storage)
            until = time.monotonic() + wait_s
            while True:
                unseen = [name for name in names if place.size_bytes(name) is None]
                if not unseen or time.monotonic() > until:
                    return unseen
                time.sleep(0.2)
        except Exception:  # noqa: BLE001
            return names

    def delete(self, storage: str, name: str) -> None:
        """Delete the file again."""
        with suppress(Exception):
            from cluster.files.storage import Storage

            Storage(storage).delete(name)

    def listen(self, host: str) -> int:
        """Listen on a port that the system chooses, as ranks and gateways do."""
        self._listener = socket.create_server((host, 0))
        return int(self._listener.getsockname()[1])

    def reach(self, places: list[tuple[str, int]]) -> list[str | None]:
        """Why each of these cannot be connected to; None where it can."""
        found: list[str | None] = []
        for place in places:
            try:
                socket.create_connection((place[0], place[1]), timeout=_CONNECT_S).close()
                found.append(None)
            except OSError as error:
                found.append(error.strerror or str(error))
        return found


def _mapped(address: str) -> str:
    """As torch's stores have it, which listen on IPv6 and ask for the name of everybody who connects."""
    return address if ":" in address else f"::ffff:{address}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[int | None, str | None]:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=_SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    if done.returncode != 0:
        return None, None
    drivers = done.stdout.split()
    return len(drivers), drivers[0] if drivers else None
