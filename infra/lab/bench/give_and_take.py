"""Devices that change hands under a load: an elastic job gives them to an app, and takes them back."""

from __future__ import annotations

import time

from cluster.errors import ShoalError
from cluster.files.storage import Storage
from cluster.sharing.journal import journal_storage
from cluster.sharing.journal import read_events as read_journal
from cluster.state.connection import ClusterRecord
from infra.lab.bench.clients import SteadyLoad
from infra.lab.bench.job_watch import JobWatch
from infra.lab.bench.load_course import Logs, Round
from train_jobs.records.listing import run_of
from train_jobs.records.run_log import read_all_metrics, read_events


class GiveAndTake:
    """An elastic job that steps, and an app beside it whose load rises and falls.

    Args:
        load: on the app; it has begun.
        low, high: the clients that ask, before a rise and after it.
    """

    def __init__(self, watch: JobWatch, load: SteadyLoad, low: int, high: int) -> None:
        self.watch = watch
        self.load = load
        self.low = low
        self.high = high

    def round(self, workers: int, *, replicas: int = 1, hold_s: float = 0.0, rest_s: float = 0.0) -> Round:
        """Let the load rise until a replica more answers, and fall until the job has its workers again.

        Args:
            workers: of the job before.
            replicas: of the app before.
            hold_s, rest_s: how long the load stays high after that, and low.

        Raises:
            ShoalError: that did not happen in time, or training gave nothing up.
        """
        self.watch.until_workers(workers)
        rose = time.time()
        self.load.level = self.high
        self.watch.until(
            lambda: len(self.load.replicas_since(rose)) > replicas,
            f"{replicas + 1} replicas did not answer under load",
            self._seen,
        )
        self.watch.pause(hold_s)
        under_load = self.watch.world_size
        fell = time.time()
        self.load.level = self.low
        if under_load >= workers:
            raise ShoalError(f"training gave nothing up: it steps with {under_load} workers under load")
        self.watch.until_workers(workers)
        self.watch.pause(rest_s)
        return Round(rose, fell, time.time(), workers, under_load)

    def again(self, like: Round) -> Round:
        """Let the load rise and fall for as long as it did in another round."""
        before, rose = self.watch.world_size, time.time()
        self.load.level = self.high
        self.watch.pause(like.fell - like.rose)
        under_load, fell = self.watch.world_size, time.time()
        self.load.level = self.low
        self.watch.pause(like.ended - like.fell)
        return Round(rose, fell, time.time(), before, under_load)

    def _seen(self) -> list[str]:
        """What a client saw."""
        failures = self.load.failures
        said = [f"{len(self.load.answers)} requests were answered, {len(failures)} failed"]
        return said + [failure.reason for failure in failures[:3]]


def logs_of(record: ClusterRecord, job: str, app: str) -> Logs:
    """All that is logged by now of a job and an app that share a cluster."""
    from serve_apps.controller.store import AppStore

    storage = Storage(record.storage)
    run = run_of(storage, job)
    return Logs(
        broker=read_journal(journal_storage(record.storage, record.name)),
        app=AppStore(storage, record.name, record.cluster_id).events(app),
        job=read_events(run),
        metrics=read_all_metrics(run),
        job_holder=f"job/{job}",
        app_holder=f"app/{app}",
    )
