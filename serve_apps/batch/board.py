"""Where the workers of one run say how far they are; its name is also the lock of the output."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from cluster.actors import NAMESPACE
from cluster.actors.named_actor import NamedActor
from cluster.errors import ShoalError
from serve_apps.batch.manifest import Totals

MAX_TRIES = 3
"""Times that a shard is begun before the run fails."""
LOCK_TIMEOUT_S = 20.0
"""How long a killed run may take to disappear."""
CALL_TIMEOUT_S = 30.0


@dataclass
class BoardState:
    """What is on the board."""

    shards: dict[int, Totals] = field(default_factory=dict)
    """Rows that are answered, of each shard that this run has begun; a repeated shard counts anew."""
    notes: list[str] = field(default_factory=list)
    """What went wrong and was mended."""
    failure: str | None = None
    """Why the run cannot go on."""
    seconds: float = 0.0
    """Since the first engine was ready; 0 before."""


class Board:
    """The actor."""

    def __init__(self) -> None:
        self._state = BoardState()
        self._tries: dict[int, int] = {}
        self._ready_at: float | None = None
        self._over = False
        self._lost = ""
        """Why the last worker that ended did."""

    def ready(self) -> None:
        """An engine has started."""
        self._ready_at = self._ready_at or time.monotonic()

    def is_suspect(self, shard: int) -> bool:
        """Whether a shard has been lost so often that the next time tells whether it was the reason."""
        return self._tries.get(shard, 0) >= MAX_TRIES - 1

    def begin(self, shard: int) -> bool:
        """A worker begins a shard; False when it was begun too often already."""
        tries = self._tries[shard] = self._tries.get(shard, 0) + 1
        if tries > MAX_TRIES:
            self.fail(f"its replica ended {MAX_TRIES} times while shard {shard} was in it")
            return False
        if tries > 1:
            self._state.notes.append(f"shard {shard} is begun again, try {tries} of {MAX_TRIES}")
        return True

    def report(self, shards: dict[int, Totals]) -> None:
        """The rows answered so far of some shards."""
        self._state.shards.update(shards)

    def lost(self, why: str) -> None:
        """A worker ends because its engine broke; another one will repeat what it had."""
        if not self._over:
            self._lost = why
            self._state.notes.append(why)

    def close(self) -> None:
        """All is done: whatever ends now is meant to."""
        self._over = True

    def fail(self, why: str) -> None:
        """The run cannot go on; the first reason counts."""
        if self._state.failure is None:
            last = f"; the last: {self._lost}" if self._lost else ""
            self._state.failure = why + last

    def read(self) -> BoardState:
        """All that is on it."""
        seconds = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        return replace(self._state, seconds=seconds)


def open_board(name: str, output: str) -> Any:
    """Start the board of an output, which no other run can have meanwhile; it ends with this driver.

    Raises:
        ShoalError: another run has it.
    """
    deadline, pause = time.monotonic() + LOCK_TIMEOUT_S, threading.Event()
    while True:
        try:
            board = (
                ray.remote(Board)
                .options(name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=-1, max_task_retries=-1)
                .remote()
            )
            ray.get(board.read.remote(), timeout=CALL_TIMEOUT_S)
            return board
        except ValueError as error:  # the name is taken: by a run, or by what is left of a killed one
            if time.monotonic() >= deadline:
                raise ShoalError(f"another `shoal batch` is writing to {output}; wait for its end") from error
        pause.wait(0.5)


def find_board(name: str) -> NamedActor:
    """The board of this run, for its workers."""
    return NamedActor(name, NAMESPACE)
