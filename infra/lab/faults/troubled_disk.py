"""A mounted disk whose answers can be troubled: reads that fail with any error, or that hang.

A directory seen through FUSE, as a disk of another machine is seen through NFS: what its server does wrong
comes out of `open` and `read`. `python -m infra.lab.faults.troubled_disk ROOT CONTROL MOUNT` is its process.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.errors import ShoalError

_STARTS_S = 20.0
_LOOK_S = 0.02
HANG = "hang"


def missing() -> str | None:
    """Why no such disk can be mounted here; None where one can."""
    if not os.access("/dev/fuse", os.W_OK):
        return "there is no /dev/fuse that may be opened"
    try:
        import mfusepy  # noqa: F401
    except ImportError as error:
        return f"mfusepy is not installed: {error}"
    except OSError as error:
        return f"libfuse is not installed: {error}"
    return None


class TroubledDisk:
    """A directory under a mount.

    Attributes:
        directory: where it is mounted.
        root: what lies below, and is never troubled.
    """

    def __init__(self, directory: Path, root: Path, control: Path) -> None:
        self.directory = directory
        self.root = root
        self._control = control

    def trouble(self, what: str, paths: str = "", times: int | None = None) -> None:
        """From now on, what touches these paths fails or hangs.

        Args:
            what: the name of an error (`ESTALE`), or `hang`.
            paths: a regular expression; only paths that it is found in.
            times: after so many failures all is well again.
        """
        beside = self._control.with_suffix(".new")
        beside.write_text(json.dumps({"what": what, "paths": paths, "times": times}))
        beside.replace(self._control)

    def mend(self) -> None:
        """All is well from now on; what hangs goes on."""
        self._control.unlink(missing_ok=True)


@contextmanager
def troubled_disk(directory: Path) -> Iterator[TroubledDisk]:
    """Such a disk in a new directory; it is gone at the end.

    Raises:
        ShoalError: it cannot be mounted.
    """
    root, mount, control = directory / "root", directory / "mount", directory / "trouble.json"
    for each in (root, mount):
        each.mkdir(parents=True)
    command = [sys.executable, "-m", "infra.lab.faults.troubled_disk", str(root), str(control), str(mount)]
    with (directory / "disk.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[3])
    try:
        deadline = time.monotonic() + _STARTS_S
        while not os.path.ismount(mount):
            if process.poll() is not None or time.monotonic() > deadline:
                said = (directory / "disk.log").read_text()
                raise ShoalError(f"no disk can be mounted at {mount}: {said}")
            time.sleep(_LOOK_S)
        yield TroubledDisk(mount, root, control)
    finally:
        control.unlink(missing_ok=True)
        subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True)
        process.terminate()
        process.wait()


def _serve(root: str, control: str, mount: str) -> None:
    import mfusepy

    class Through(mfusepy.Operations):  # type: ignore[misc, unused-ignore]
        use_ns = True

        def __init__(self) -> None:
            self._failed = (0.0, 0)
            """When the trouble began, and how often it has struck."""

        def _real(self, path: str) -> str:
            return os.path.join(root, path.lstrip("/"))

        def _suffer(self, path: str) -> None:
            while True:
                try:
                    began = os.stat(control).st_mtime
                    trouble = json.loads(Path(control).read_text())
                except FileNotFoundError:
                    return
                struck = self._failed[1] if self._failed[0] == began else 0
                over = trouble["times"] is not None and struck >= trouble["times"]
                if over or not re.search(trouble["paths"], path):
                    return
                if trouble["what"] != HANG:
                    self._failed = (began, struck + 1)
                    raise mfusepy.FuseOSError(getattr(errno, trouble["what"]))
                time.sleep(_LOOK_S)

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            self._suffer(path)
            stat = os.lstat(self._real(path))
            times = {f"st_{name}": getattr(stat, f"st_{name}_ns") for name in ("atime", "ctime", "mtime")}
            names = [f"st_{name}" for name in ("gid", "uid", "mode", "nlink", "size")]
            return times | {name: getattr(stat, name) for name in names}

        def readdir(self, path: str, fh: int) -> list[str]:
            self._suffer(path)
            return [".", "..", *os.listdir(self._real(path))]

        def open(self, path: str, flags: int) -> int:
            self._suffer(path)
            return os.open(self._real(path), flags)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            self._suffer(path)
            return os.pread(fh, size, offset)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            self._suffer(path)
            return os.open(self._real(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            self._suffer(path)
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            os.truncate(self._real(path), length)

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            os.fsync(fh)

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

        def mkdir(self, path: str, mode: int) -> None:
            self._suffer(path)
            os.mkdir(self._real(path), mode)

        def rmdir(self, path: str) -> None:
            self._suffer(path)
            os.rmdir(self._real(path))

        def unlink(self, path: str) -> None:
            self._suffer(path)
            os.unlink(self._real(path))

        def rename(self, old: str, new: str) -> None:
            self._suffer(old)
            os.rename(self._real(old), self._real(new))

        def chmod(self, path: str, mode: int) -> None:
            os.chmod(self._real(path), mode)

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
            os.utime(self._real(path), ns=times or (time.time_ns(),) * 2)

        def statfs(self, path: str) -> dict[str, int]:
            stat = os.statvfs(self._real(path))
            names = "bavail bfree blocks bsize favail ffree files flag frsize namemax"
            return {f"f_{name}": getattr(stat, f"f_{name}") for name in names.split()}

    # The kernel keeps nothing but pages of open files: each look and each opening is troubled as it comes.
    quick = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0}
    mfusepy.FUSE(Through(), mount, foreground=True, nothreads=False, **quick)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
