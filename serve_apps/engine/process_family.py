"""The processes that a library starts in this one: none outlives the engine, nor this process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from serve_apps.engine import process_guard

LOOK_EVERY_S = 0.1
"""How often new processes are looked for while they are started."""
END_TIMEOUT_S = 30.0


class ProcessFamily:
    """Knows the children of this process that came since it was made, and what came of them.

    A guard beside this process (see `process_guard`) ends them should this process be killed; only what was
    started within the last 0.1 s before that escapes it.
    """

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._known: set[psutil.Process] = set()
        self._files: set[Path] = set()
        """Shared memory of theirs, which is not freed with them."""
        self._told: set[psutil.Process | Path] = set()
        self._lock = threading.Lock()
        self.directory = Path(tempfile.mkdtemp(prefix="shoal-engine-"))
        """For files that live as long as the family."""
        command = [sys.executable, "-P", process_guard.__file__, str(self._self.pid), str(self.directory)]
        # A session of its own: what is sent to this process's group does not end it first.
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._before = set(self._self.children())

    @contextmanager
    def growing(self) -> Iterator[None]:
        """While the context is open, every new child of this process belongs to the family."""
        grown = threading.Event()

        def look() -> None:
            while not grown.wait(LOOK_EVERY_S):
                self._add(set(self._self.children()) - self._before)

        thread = threading.Thread(target=look, name="process-family", daemon=True)
        thread.start()
        try:
            yield
        finally:
            grown.set()
            thread.join()
            self._add(set(self._self.children()) - self._before)

    def look(self) -> None:
        """Learn of what the family's processes have started since, and of their shared memory."""
        self._add(set())

    def members(self) -> list[psutil.Process]:
        """The processes of the family that run."""
        with self._lock:
            return sorted(process_guard.with_descendants(self._known), key=lambda process: process.pid)

    def kill(self) -> None:
        """Kill all that is left of it; stopped processes end too.

        Raises:
            TimeoutError: a process is there after 30 s.
        """
        self.look()
        with self._lock:
            left = process_guard.kill(self._known, END_TIMEOUT_S)
            for file in self._files:
                file.unlink(missing_ok=True)
        if left:
            raise TimeoutError(f"processes {', '.join(str(process.pid) for process in left)} do not end")

    def end(self) -> None:
        """Kill all that is left of it, remove its directory, and end the guard; raises what `kill` does."""
        try:
            self.kill()
        finally:
            if self._guard.stdin is not None:
                with suppress(OSError):  # someone has killed it
                    self._guard.stdin.close()  # it finds nothing left but the directory
            self._guard.wait(2 * END_TIMEOUT_S)

    def _add(self, found: set[psutil.Process]) -> None:
        with self._lock:
            self._known |= process_guard.with_descendants(self._known | found)
            self._files |= process_guard.shared_memory(self._known)
            new = (self._known | self._files) - self._told
            if not new or self._guard.stdin is None or self._guard.stdin.closed:
                return
            names = (str(one) if isinstance(one, Path) else process_guard.name_of(one) for one in new)
            with suppress(OSError):  # someone has killed the guard
                self._guard.stdin.write("".join(f"{name}\n" for name in names).encode())
                self._guard.stdin.flush()
            self._told |= new
