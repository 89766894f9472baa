"""A step of the batch job, as its first node sees it: a node, and what it says of itself."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

LIVES = "lives"
"""What a node says again and again while nothing changes."""
SILENT_S = 60.0
"""A node that has said nothing for so long is lost."""
NOTICE = "notice"
"""What a node says when Slurm has told its task to leave."""


@dataclass
class NodeStep:
    """A step of the job on one node: a program that prints lines of JSON about it.

    Attributes:
        notice: called when Slurm has told it to leave.
        last: what it has said last.
    """

    command: Sequence[str]
    tell: Callable[[str], None]
    notice: Callable[[], None]
    last: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    """srun; None before it is started."""
    heard_at: float = 0.0
    """When it has said anything last, of a steady clock."""

    def start(self) -> None:
        """Start it."""
        self.heard_at = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a signal to the group of this process is for this process
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def is_over(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    @property
    def is_up(self) -> bool:
        """Whether Ray runs there."""
        return self.last.get("state") == "up" and not self.is_over

    @property
    def is_settled(self) -> bool:
        """Whether it is known if Ray starts there."""
        return self.is_over or self.last.get("state") in ("up", "failed", "lost")

    def is_silent(self, now: float) -> bool:
        """Whether it runs, as Slurm has it, and cannot be heard: Slurm does not see that a node has lost its
        power where that comes back soon."""
        return self.is_up and now - self.heard_at > SILENT_S

    def give_up(self) -> str | None:
        """End srun at once; the number of the step, which Slurm may still have."""
        assert self.process is not None, "it is started"
        self.process.kill()
        self.process.wait()
        return self.last.get("step")

    def end(self) -> None:
        """Tell it to end."""
        if self.process is not None and not self.is_over:
            self.process.send_signal(signal.SIGUSR2)  # srun hands it on

    def wait(self, deadline: float) -> None:
        """Wait until it has; what has not by then goes with the job."""
        if self.process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.1, deadline - time.monotonic()))
        if self.is_over:
            self._listener.join(1.0)

    def _listen(self) -> None:
        assert self.process is not None, "it is started"
        assert self.process.stdout is not None, "it is piped"
        for line in self.process.stdout:
            try:
                said = json.loads(line)
                node, state = said["node"], said["state"]
            except (ValueError, TypeError, KeyError):
                print(line, end="", flush=True)  # of Slurm, or of Ray's start
                continue
            self.heard_at = time.monotonic()
            if state == LIVES:
                continue
            if state == NOTICE:
                self.notice()
                continue
            self.last = said
            if state in ("failed", "lost"):
                self.tell(f"{node}: its part of the cluster has ended; it said last:\n{said['said']}")
