"""Where what a person's commands know of clusters is kept: one private directory each.

    ~/.local/state/shoal/<name>/        0700, ours: record, token, logs of the nodes' starts
    ~/.local/state/shoal/.<name>.lock   held while one command starts or stops the cluster

$XDG_STATE_HOME, where it is set, is in the place of ~/.local/state. A home may be one of several machines'.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.errors import ShoalError

LOCK_TIMEOUT_S = 180.0
POLL_S = 0.05


def state_root() -> Path:
    """The directory of all clusters that this user knows of.

    Raises:
        ShoalError: this user has no home.
    """
    return xdg_directory("XDG_STATE_HOME", ".local/state", "what is known of clusters")


def config_root() -> Path:
    """The directory of what this user's commands are told: contexts, and their tokens.

    Raises:
        ShoalError: this user has no home.
    """
    return xdg_directory("XDG_CONFIG_HOME", ".config", "contexts")


def xdg_directory(variable: str, usual: str, what: str) -> Path:
    """Our directory below one of those that the XDG Base Directory Specification has.

    Args:
        variable: says where that one is.
        usual: where it is else, from the user's home.
        what: what is kept there, for the message.

    Raises:
        ShoalError: this user has no home.
    """
    base = os.environ.get(variable, "")
    if not os.path.isabs(base):  # so the specification has it
        try:
            base = str(Path.home() / usual)
        except RuntimeError as error:
            raise ShoalError(f"this user has no home to keep {what} in: set HOME or {variable}") from error
    return Path(base, "shoal")


def state_directory(name: str) -> Path:
    """The directory of one cluster."""
    return state_root() / name


def require_private(directory: Path) -> None:
    """Make sure that a directory is ours alone, and create it where it is not there.

    Raises:
        ShoalError: it cannot be made; it is something else; or others can read or change it: whoever can do
            that could start programs as us, so nothing is read from it.
    """
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    except OSError as error:
        raise ShoalError(
            f"{directory} cannot be made ({error.strerror}); XDG_STATE_HOME names another place"
        ) from error
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ShoalError(f"{directory} is not a directory; remove it, or whoever put it there should")
    if found.st_uid != os.getuid():
        raise ShoalError(f"{directory} belongs to user {found.st_uid}, not to us ({os.getuid()})")
    if found.st_mode & 0o077:
        raise ShoalError(
            f"{directory} is open to others (mode {stat.S_IMODE(found.st_mode):o}); it must be 700."
            f" If you trust what is in it: chmod 700 {directory}"
        )


def remove_state(name: str) -> None:
    """Forget a cluster; its lock stays with who holds it."""
    directory = state_directory(name)
    if directory.exists():
        require_private(directory)
        shutil.rmtree(directory)


def write_private(path: Path, text: str) -> None:
    """Write a file that only we can read; it is whole or absent (a temporary name, then a move)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


@contextlib.contextmanager
def locked(
    name: str, on_wait: Callable[[], None] | None = None, timeout_s: float = LOCK_TIMEOUT_S
) -> Iterator[None]:
    """Hold the lock of a cluster; `on_wait` is called once when another process has it.

    The lock goes with the process that holds it, however that ends. The file is removed at the end when
    the cluster has no state, so that nothing stays behind.

    Raises:
        ShoalError: another process held it for all of `timeout_s`.
    """
    directory = state_directory(name)
    path = directory.with_name(f".{name}.lock")
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    descriptor = _try_lock(path)
    if descriptor is None and on_wait is not None:
        on_wait()
    while descriptor is None:
        if time.monotonic() >= deadline:
            raise ShoalError(
                f"another command has been starting or stopping cluster {name} for {timeout_s:.0f} s"
                f" (it holds {path}); wait for it or end it"
            )
        pause.wait(POLL_S)
        descriptor = _try_lock(path)
    try:
        yield
    finally:
        if not directory.exists():
            path.unlink(missing_ok=True)
        os.close(descriptor)
        with contextlib.suppress(OSError):  # other clusters are there, or will be in a moment
            path.parent.rmdir()


def _try_lock(path: Path) -> int | None:
    """The locked file's descriptor, or None when another process has the lock now."""
    require_private(path.parent)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:  # the last cluster's end removed the root between the two lines
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it may have removed the file: then this lock is on a file that no one else sees.
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except FileNotFoundError:
        pass  # as above: the file is gone, try again with a new one
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise
    os.close(descriptor)
    return None
