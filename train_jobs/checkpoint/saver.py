"""When a checkpoint is saved and what stays of the older ones; in the foreground or behind the step loop."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from cluster.config.sections.train import CheckpointConfig
from cluster.errors import ShoalError
from train_jobs.checkpoint.files import CheckpointWriter
from train_jobs.checkpoint.retention import Retention
from train_jobs.checkpoint.state import BackgroundSave, TrainingState
from train_jobs.checkpoint.store import CheckpointStore, checkpoint_name
from train_jobs.errors import CheckpointError
from train_jobs.parallel.agreement import from_rank_0

# torch derives its own from BaseException.
_FAILED = (Exception, CheckpointException)


class Events(Protocol):
    def __call__(self, kind: str, **facts: Any) -> None: ...


class CheckpointSaver:
    """Saves the state of all ranks. All ranks call the same methods in step.

    A save that fails is logged and counted; the job ends when more fail in a row than
    `recovery.checkpoint_failures` allows.

    Args:
        event: where rank 0 says what was saved.
    """

    def __init__(
        self,
        store: CheckpointStore,
        state: TrainingState,
        config: CheckpointConfig,
        allowed_failures: int,
        event: Events,
    ) -> None:
        self.store = store
        self.state = state
        self.config = config
        self.retention = Retention.of(config)
        self.allowed_failures = allowed_failures
        self.event = event
        self.last: int | None = None
        self.failures = 0
        self.stalled_s = 0.0
        """Seconds that training stood still for the last save."""
        self._pending: tuple[int, BackgroundSave] | None = None
        self._evaluation: dict[str, Any] | None = None
        """The last one, until it is noted."""
        self._clearing: Future[object] | None = None
        self._clearer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retention")

    def save(self) -> None:
        """Save the state as it is now: on return it counts, or in the background, and then `hold` comes next.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        began = time.perf_counter()
        self.finish()
        self.stalled_s = 0.0
        step = self.state.step
        self.last = step
        facts = {"step": step, "world_size": dist.get_world_size()}
        try:
            self._prepare(step)
            writer = CheckpointWriter(self.store.storage, checkpoint_name(step), facts)
            if self.config.asynchronous:
                self._pending = (step, self.state.save_in_background(writer))
            else:
                self.state.save(writer)
        except _FAILED as error:  # whatever it is, the job may go on without this one
            self._failed(step, error)
            return
        self.stalled_s = time.perf_counter() - began
        if self._pending is None:
            self._saved(step)

    def evaluated(self, evaluation: dict[str, Any]) -> None:
        """Note the means of the held-out data with the checkpoint of their step, if it has one."""
        if dist.get_rank() == 0 and evaluation["step"] == self.last:
            self._evaluation = evaluation
            if self._pending is None:
                self._tidy()

    def hold(self) -> None:
        """Wait until parameters and optimizer state may change: a save in flight may be copying them."""
        if self._pending is None or self._pending[1].copied.done():
            return
        began = time.perf_counter()
        wait([self._pending[1].copied])  # what went wrong in it, the save itself says
        self.stalled_s += time.perf_counter() - began

    def lacks_last(self) -> bool:
        """Whether the last step that was due is not in the store; asked by all ranks of a group together."""
        return from_rank_0(lambda: bool(self.last) and self.store.newest() != self.last, self._patient)

    @property
    def saving(self) -> bool:
        """Whether a save is in flight."""
        return self._pending is not None

    def poll(self) -> None:
        """Look after a background save that is done; costs nothing otherwise."""
        if self._pending is not None and self._pending[1].written.done():
            self._end()

    def wait(self) -> None:
        """Wait for the save in flight; all ranks do so together."""
        if self._pending is not None:
            self._end()

    def finish(self) -> None:
        """Wait for the save in flight, and for older checkpoints to be cleared away: rank 0's alone."""
        self.wait()
        if self._clearing is not None:
            clearing, self._clearing = self._clearing, None
            clearing.result()

    @property
    def _patient(self) -> dist.ProcessGroup:
        return self.state.parallel.mesh.patient

    def _end(self) -> None:
        assert self._pending is not None, "no save is in flight"
        step, save = self._pending
        self._pending = None
        try:
            save.written.result()
        except _FAILED as error:
            self._failed(step, error)
            return
        self._saved(step)

    def _prepare(self, step: int) -> None:
        """Rank 0 makes room; the others wait, and hear when it could not."""
        from_rank_0(lambda: self.store.prepare(step), self._patient)

    def _saved(self, step: int) -> None:
        # It was committed by the coordinator, when all ranks had written.
        self.failures = 0
        if dist.get_rank() == 0:
            self.event("checkpointed", step=step, stalled_s=round(self.stalled_s, 3))
            self._tidy()

    def _tidy(self) -> None:
        """Note an evaluation, and clear away what need not stay: in a thread, since both take their time."""
        evaluation, self._evaluation = self._evaluation, None
        self._clearing = self._clearer.submit(self._note_and_clear, evaluation)

    def _note_and_clear(self, evaluation: dict[str, Any] | None) -> None:
        try:
            if evaluation is not None:
                self.store.note(evaluation["step"], {"evaluation": evaluation})
            self.store.retain(self.retention, self.config.metric)
        except ShoalError as error:  # the next one tries again
            self.event("retention_failed", reason=str(error))

    def _failed(self, step: int, error: BaseException) -> None:
        self.failures += 1
        self._evaluation = None
        reason = cause(error)
        if dist.get_rank() == 0:
            self.event("checkpoint_failed", step=step, reason=reason, failures=self.failures)
            self._drop_half(step)
        if self.failures > self.allowed_failures:
            raise CheckpointError(
                f"{self.failures} checkpoints in a row could not be saved (recovery.checkpoint_failures "
                f"allows {self.allowed_failures}); the last, of step {step}: {reason}"
            ) from error

    def _drop_half(self, step: int) -> None:
        """Delete what was written of a save that failed: it takes the room that the next one needs."""
        try:
            self.store.drop_half(step)
        except ShoalError as error:  # the next start tries again
            print(f"what there is of the checkpoint of step {step} stays for now: {error}", flush=True)


def cause(error: BaseException) -> str:
    """It in a line; torch wraps what went wrong on each rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}".splitlines()[0]
