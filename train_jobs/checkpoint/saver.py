"""When a checkpoint is saved and when it counts; in the foreground or behind the step loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from train_jobs.checkpoint.state import TrainingState
from train_jobs.checkpoint.store import CheckpointStore


class CheckpointSaver:
    """Saves the state of all ranks and commits it from rank 0. All ranks call the same methods in step.

    Args:
        keep: how many of the newest checkpoints stay.
        asynchronous: write behind the step loop; at most one save is in flight.
        on_commit: called on rank 0 with the step, once the checkpoint counts.
    """

    def __init__(
        self,
        store: CheckpointStore,
        state: TrainingState,
        *,
        keep: int,
        asynchronous: bool,
        on_commit: Callable[[int], None],
    ) -> None:
        self.store = store
        self.state = state
        self.keep = keep
        self.asynchronous = asynchronous
        self.on_commit = on_commit
        self.last: int | None = None
        self._pending: tuple[int, Future[Any]] | None = None

    def save(self) -> None:
        """Save the state as it is now. In the foreground it counts on return."""
        self.finish()
        step = self.state.step
        if dist.get_rank() == 0:
            self.store.prepare(step)
        dist.barrier()
        self.last = step
        if self.asynchronous:
            self._pending = (step, self.state.save_in_background(self.store.path(step)))
            return
        self.state.save(self.store.path(step))
        self._commit(step)

    def poll(self) -> None:
        """Commit a background save that is done; costs nothing otherwise."""
        if self._pending is not None and self._pending[1].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight and commit it."""
        if self._pending is None:
            return
        step, saved = self._pending
        self._pending = None
        saved.result()
        self._commit(step)

    def _commit(self, step: int) -> None:
        # DCP's coordinator (rank 0) ends a save only when it has the results of all ranks, so that rank 0 may
        # commit without asking the others.
        if dist.get_rank() == 0:
            self.store.commit(step, {"world_size": dist.get_world_size()}, self.keep)
            self.on_commit(step)
