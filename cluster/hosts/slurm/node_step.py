"""A step of the batch job, as its first node sees it: nodes, and what they say of themselves."""

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


@dataclass
class NodeStep:
    """A step of the job: programs that print lines of JSON about their nodes.

    Attributes:
        states: of its nodes, by name.
    """

    command: Sequence[str]
    tell: Callable[[str], None]
    states: dict[str, dict[str, Any]] = field(default_factory=dict)

    def start(self) -> None:
        """Start it."""
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
        return self.process.poll() is not None

    def count(self, *states: str) -> int:
        """How many of its nodes are in one of these states."""
        return sum(each["state"] in states for each in self.states.values())

    def end(self) -> None:
        """Tell its nodes to end."""
        if not self.is_over:
            self.process.send_signal(signal.SIGUSR2)  # srun hands it on

    def wait(self, deadline: float) -> None:
        """Wait until they have; what has not by then goes with the job."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.1, deadline - time.monotonic()))
        if self.is_over:
            self._listener.join(1.0)

    def _listen(self) -> None:
        assert self.process.stdout is not None, "it is piped"
        for line in self.process.stdout:
            try:
                said = json.loads(line)
                node, state = said["node"], said["state"]
            except (ValueError, TypeError, KeyError):
                print(line, end="", flush=True)  # of Slurm, or of Ray's start
                continue
            self.states[node] = said
            if state in ("failed", "lost"):
                self.tell(f"{node}: its part of the cluster has ended; it said last:\n{said['said']}")
