"""What each replica had, for drills: an engine that notes its requests, to be read when it is dead.

Each process of a rank 0 writes a file `replica-PID` beside the model: its replica's id once it is ready, then
a line for each request that it takes (`+ ID TIME`) and is done with (`- ID TIME`). Times are of the machine's
steady clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_apps.engine.protocol import Delta, EngineConfig, SamplingParams
from serve_apps.replica.engine_process import REPLICA

STARTED, TOOK, DONE = "=", "+", "-"


class Noting:
    """Goes before an engine's class in the bases of one that notes."""

    config: EngineConfig

    async def start(self) -> None:
        engine: Any = super()
        await engine.start()
        self._path = Path(self.config.model_path, f"replica-{os.getpid()}")
        self._note(STARTED, os.environ[REPLICA])

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[Delta]:
        engine: Any = super()
        self._note(TOOK, request_id)
        try:
            async with aclosing(
                engine.generate(request_id, prompt_ids, sampling, priority, cache_salt)
            ) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._note(DONE, request_id)

    def _note(self, sign: str, what: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{sign} {what} {time.monotonic()}\n")


@dataclass(frozen=True)
class Notes:
    """What one replica noted."""

    pid: int
    replica: str
    taken: dict[str, float]
    """When it took each request."""
    done: dict[str, float]

    def had(self, at: float) -> set[str]:
        """The requests that it had at a moment."""
        return {r for r, took in self.taken.items() if took <= at and self.done.get(r, at + 1) > at}


def notes_of(model_path: str | Path) -> list[Notes]:
    """The notes of every replica that there was with this model, the dead ones included."""
    found = []
    for path in sorted(Path(model_path).glob("replica-*")):
        lines = [line.split(" ") for line in path.read_text().splitlines()]
        replica = next((line[1] for line in lines if line[0] == STARTED), None)
        if replica is not None:
            taken, done = (
                {line[1]: float(line[2]) for line in lines if line[0] == sign and len(line) == 3}
                for sign in (TOOK, DONE)
            )
            found.append(Notes(int(path.name.partition("-")[2]), replica, taken, done))
    return found
