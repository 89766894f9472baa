"""A job's data, prepared once for all of its attempts: here, or on the job's workers where it takes long."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from cluster.sharing.demand import Grant
from train_jobs.data.tokenizing import LongWorkError
from train_jobs.driver.data_errors import NotThereError, StoppedError
from train_jobs.driver.data_process import prepare_apart
from train_jobs.driver.job_lease import RENEW_S, JobLease


class DataJob(Protocol):
    """What is needed of the driver."""

    config: TrainJobConfig

    def tell(self, kind: str, **facts: Any) -> None:
        """Log an event."""

    def is_stopping(self) -> bool: ...

    def wait_for_lease(self) -> Grant: ...


class JobData:
    """Prepares the data of one job.

    What takes more than a minute is done on the job's workers, as soon as it has some; until then it goes on
    here, and so it does where they do not see the documents, or have fewer CPUs than are here.

    Args:
        lease: what it holds in the end the caller has to release.
        place: where every rank finds the data.
        notes: where jobs note what they have made of theirs.
    """

    def __init__(self, job: DataJob, lease: JobLease, place: Storage, notes: Storage | None = None) -> None:
        self.job = job
        self.lease = lease
        self.place = place
        self.notes = notes

    def prepare(self) -> bool:
        """Fill the data directory; whether anything in it is another than before.

        Raises:
            StoppedError: the job is to stop; the next time goes on from where it was.
            ShoalError: the data cannot be had; a RequestError where asking again gives the same.
        """
        workers = self.job.config.workers
        shares = workers.min * workers.cpus >= len(os.sched_getaffinity(0))
        try:
            return self._apart(self.job.is_stopping, hand_over=shares)
        except LongWorkError as error:
            self._say(f"{error}; the job's workers are asked for, to do it side by side")
        while not self._here_until_granted() and not self._on_nodes():
            pass
        return True

    def _here_until_granted(self) -> bool:
        """Go on here until there is a lease; whether all was done before."""
        look = self._looker(())

        def is_granted() -> bool:
            grant = look()
            return grant is not None and grant.units >= self.lease.least

        try:
            if not is_granted():
                self._apart(lambda: self.job.is_stopping() or is_granted())
                return True
        except StoppedError:
            if self.job.is_stopping():
                raise
        return False

    def _on_nodes(self) -> bool:
        """Go on there for as long as the lease stays what it is; whether all is done."""
        units = self.job.wait_for_lease().nodes
        nodes = [node for node in units for _ in range(self.lease.unit_size)]
        look = self._looker(units)

        def is_another() -> bool:
            grant = look()
            return grant is not None and sorted(grant.nodes) != sorted(units)

        config = self.job.config
        facts = {"task": config.task, "source": config.source, "pid": os.getpid()}
        self.job.tell("preparing", **facts, workers=len(nodes))
        try:
            self._apart(lambda: self.job.is_stopping() or is_another(), nodes)
        except StoppedError:
            if self.job.is_stopping():
                raise
            return False
        except NotThereError as error:
            self._say(f"{error}; it goes on in one process")
            self.lease.release()
            self.job.tell("preparing", **facts)
            self._apart(self.job.is_stopping)
        except RequestError:
            raise
        except ShoalError as error:
            if self.lease.alive_of(units) >= set(units):
                raise
            self._say(f"a node was lost: {error}")
            return False
        return True

    def _apart(
        self, stop: Callable[[], bool], nodes: Sequence[str] | None = None, *, hand_over: bool = False
    ) -> bool:
        return prepare_apart(
            self.job.config, self.place, stop, self._say, nodes, hand_over=hand_over, notes=self.notes
        )

    def _say(self, words: str) -> None:
        self.job.tell("prepares", said=words)

    def _looker(self, held: Sequence[str]) -> Callable[[], Grant | None]:
        """What asks for a lease or renews it, now and then; it returns what is granted, when it has asked."""
        asked_at = -math.inf

        def look() -> Grant | None:
            nonlocal asked_at
            if time.monotonic() - asked_at < RENEW_S:
                return None
            asked_at = time.monotonic()
            return self.lease.renew(held, held)

        return look
