"""A rank of a script of the user's: its process, how far it is, and its end beside that of the others."""

from __future__ import annotations

import math
import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from cluster.files.storage import Storage
from cluster.files.time_limit import within
from train_jobs.errors import EndedEarlyError, ScriptError, ScriptHangError
from train_jobs.parallel.rendezvous import open_store, reach_store
from train_jobs.rank.link import RankOrder, Worker
from train_jobs.rank.reporters import is_collective, reporter_of, say_started
from train_jobs.rank.script import ScriptProcess
from train_jobs.rank.script_progress import ScriptProgress, ScriptStep, Stillness, fingerprint
from train_jobs.records.workspace import Workspace
from train_jobs.spec import CHECKPOINTS, EXPORT, LOGS, WORK
from train_jobs.watch.flight_recorder import FlightRecorder
from train_jobs.watch.progress import Progress

_LOOK_S = 2.0
_STACKS_S = 20.0
_SAVES_LOOK_S, _OF_LOOK = 2.0, 30.0
"""How often it is looked at what a script has saved: less often where a look takes its time."""
_STILL_SAVES_S = 10.0
"""So long after a change of what it has saved a script counts as saving."""
_SLOW_READ_S = 1.0
_NO_FILES = (0, 0, 0)
_ENDED, _STANDS, _HANGS = "shoal/ended/", "shoal/stands/", "shoal/hangs"
"""Keys in the store that the ranks share with their scripts: of a rank whose script has ended well, of one
that has said where it stood, and why all should say it."""


class ScriptRun:
    """Runs one rank of a script to the end of all its ranks.

    Args:
        worker: what it is asked and told through.
    """

    step: int | None = None
    """Steps done, as far as the script has said; only rank 0 hears it."""

    def __init__(self, order: RankOrder, worker: Worker, progress: Progress) -> None:
        self.order = order
        self.worker = worker
        self.progress = progress
        self.reporter = reporter_of(order, worker)
        self._run = Workspace(Storage(order.spec.run)).directory
        self._saving = ExitStack()
        """Open while the script saves that is to stop."""

    def prepare(self) -> None:
        """Its data is its own affair."""

    def run(self) -> str:
        rank = self.order.place.rank
        # A store of its own, as torchrun's agent opens one: torch uses the same names in every default group.
        store, address = open_store(self.order.host) if rank == 0 else (None, "")
        meeting = [address]
        dist.broadcast_object_list(meeting)
        self._store = store or reach_store(meeting[0])
        say_started(self.order, self.reporter, step=0)
        log = self._run / LOGS / f"attempt-{self.order.spec.attempt}" / f"rank-{rank}.log"
        environment = self._environment(meeting[0].rpartition(":")[2], log.with_suffix(".error.json"))
        self._process = ScriptProcess(self.order.spec.config, environment, log, self._run / WORK)
        self._watch = _ScriptWatch(self, self._process) if rank == 0 else None
        self._files = None if self._watch is None else self._watch.files
        self._looked_at = time.monotonic()
        try:
            with self.progress.waiting():  # how long a script takes only itself knows
                with self._saving:
                    outcome = self._process.wait(self.worker.is_stopping, self._look, self._is_saving)
                self._store.set(f"{_ENDED}{rank}", "")
                if rank == 0:
                    self._wait_for_all(_ENDED)
                return outcome
        except ScriptHangError:
            raise
        except ScriptError as error:
            if not is_collective(error):
                raise
            if self._store.check([_HANGS]):  # its peers were ended, since they do not get on
                self._stand(self._store.get(_HANGS).decode(), error.output)
            early = self._that_have(_ENDED)
            if early:
                raise EndedEarlyError(
                    f"rank {early[0]} had ended, with exit code 0, and rank {rank} still needed it"
                    f" ({error.output.strip().splitlines()[-1]})"
                ) from error
            raise
        finally:
            self._process.kill()

    def _environment(self, port: str, error_file: Path) -> dict[str, str]:
        work, copy = self._run / WORK, os.getcwd()
        environment = {
            "MASTER_PORT": port,
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            "SHOAL_CHECKPOINT_DIR": str(self._run / CHECKPOINTS),
            "SHOAL_EXPORT_DIR": str(self._run / EXPORT),
            "SHOAL_WORK_DIR": str(work),
        }
        if paths := os.environ.get("PYTHONPATH"):
            # Ray's copy of the folder is of this node and this attempt alone: nothing is to be found there.
            own = [str(work) if path == copy else path for path in paths.split(os.pathsep)]
            environment["PYTHONPATH"] = os.pathsep.join(own)
        return environment

    def _look(self) -> None:
        """See how far the script is, and whether it hangs: rank 0 sees that, and all say where they stand."""
        now = time.monotonic()
        wrong = None if self._watch is None else self._watch.look(now)
        if wrong is not None:
            self._store.set(_HANGS, f"did not get on: rank 0 {wrong}")
        if wrong is not None or now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            if self._store.check([_HANGS]):
                self._say_where_it_stands(self._store.get(_HANGS).decode())

    def _is_saving(self) -> bool:
        """Whether what the script saves still changes, which those who wait for its end are told."""
        now = time.monotonic()
        self._files = self._files or _SavedFiles(self._run / CHECKPOINTS)
        if self._watch is None:
            self._files.look(now)
        if now > self._files.changes_until:
            self._saving.close()
            return False
        if not self.progress.saves:
            self._saving.enter_context(self.progress.saving())
        return True

    def _say_where_it_stands(self, wrong: str) -> NoReturn:
        flights = self.order.flights
        recorder = None if flights is None else FlightRecorder(flights, self.order.place.rank)
        if recorder is not None and recorder.ask():
            recorder.wait()
        self._stand(wrong, self._process.abort())

    def _stand(self, wrong: str, output: str) -> NoReturn:
        """Fail beside all the others: which of them hangs is seen where all have said where they stand."""
        self._store.set(f"{_STANDS}{self.order.place.rank}", "")
        with suppress(dist.DistError):  # the store has gone with rank 0, which has waited for all
            self._wait_for_all(_STANDS, _STACKS_S)
        raise ScriptHangError(wrong, output)

    def _wait_for_all(self, key: str, timeout_s: float = math.inf) -> None:
        """Stay until every rank has said this; the store, which they may still need, is rank 0's."""
        until = time.monotonic() + timeout_s
        while len(self._that_have(key)) < self.order.place.world_size and time.monotonic() < until:
            time.sleep(_LOOK_S / 10)

    def _that_have(self, key: str) -> list[int]:
        return [rank for rank in range(self.order.place.world_size) if self._store.check([f"{key}{rank}"])]


class _SavedFiles:
    """What a script has saved, looked at now and then.

    Attributes:
        changes_until: as long as it counts as changing, by the last look.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: tuple[int, int, int] = _NO_FILES
        self._seen = self._look()
        self._next = time.monotonic() + _SAVES_LOOK_S
        self.changes_until = -math.inf

    def look(self, now: float) -> bool | None:
        """Whether it has changed since the last look; None where none is due yet."""
        if now < self._next:
            return None
        before, self._seen = self._seen, self._look()
        took_s = time.monotonic() - now
        self._next = time.monotonic() + max(_SAVES_LOOK_S, _OF_LOOK * took_s)
        if self._seen != before:
            self.changes_until = max(now + _STILL_SAVES_S, self._next + _LOOK_S)
        return self._seen != before

    def _look(self) -> tuple[int, int, int]:
        """As it was, where the storage does not answer."""
        return within(_LOOK_S, lambda: fingerprint(self._directory), otherwise=self._seen)


class _ScriptWatch:
    """What rank 0 sees of its script, for all of them."""

    def __init__(self, run: ScriptRun, process: ScriptProcess) -> None:
        config, now = run.order.spec.config, time.monotonic()
        self._owner = run
        self._process = process
        self._progress = None if config.progress is None else ScriptProgress(config.progress)
        recovery = config.recovery
        self._stillness = Stillness(recovery.start_timeout_s, recovery.hang_timeout_s, now)
        self.files = _SavedFiles(Path(Storage(run.order.spec.run).location, CHECKPOINTS))
        self._saves = False
        self._step_at: float | None = None

    def look(self, now: float) -> str | None:
        """Tell of steps and saves; returns what is wrong where the script hangs."""
        printed = self._process.new_output()
        if printed or time.monotonic() - now > _SLOW_READ_S:  # it may have waited for the same storage
            self._stillness.moved(time.monotonic())
        step = None if self._progress is None else self._progress.read(printed)
        if step is not None:
            self._stillness.moved(now, step=True)
            self._tell(step, now)
        self._see_files(now)
        return None if self._progress is None else self._stillness.hang(now)

    def _tell(self, step: ScriptStep, now: float) -> None:
        owner, before_at = self._owner, self._step_at
        # How long the first took is not known: there is no end of the step before it.
        count = 0 if before_at is None else step.step - (owner.step or 0)
        line: dict[str, Any] = {
            "attempt": owner.order.spec.attempt,
            "step": step.step,
            "loss": step.loss,
            "count": count,
            "step_s": 0.0 if before_at is None else (now - before_at) / count,
        }
        owner.step, self._step_at = step.step, now
        owner.reporter.metric(line if step.steps is None else {**line, "steps": step.steps})

    def _see_files(self, now: float) -> None:
        """A save is told of when it is whole: when nothing of it changes any more."""
        changed = self.files.look(now)
        if changed:
            self._saves = True
            self._stillness.moved(now)
        elif changed is False and self._saves:
            self._saves = False
            self._owner.reporter.event("saved", attempt=self._owner.order.spec.attempt)
