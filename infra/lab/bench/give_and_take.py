"""Devices that change hands under a load: an elastic job gives them to an app, and takes them back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cluster.errors import ShoalError
from cluster.files.line_reader import LineReader
from cluster.files.storage import Storage
from cluster.sharing.journal import journal_storage
from cluster.sharing.journal import read_events as read_journal
from cluster.state.connection import ClusterRecord
from infra.lab.bench.clients import SteadyLoad
from infra.lab.bench.load_course import Logs, Round
from train_jobs.records.listing import run_of
from train_jobs.records.run_log import EVENTS, METRICS, read_all_metrics, read_events

_LOOK_S = 0.1


class GiveAndTake:
    """An elastic job that steps, and an app beside it whose load rises and falls.

    Args:
        run: the job's directory in the storage.
        load: on the app; it has begun.
        low, high: the clients that ask, before a rise and after it.
    """

    def __init__(self, run: Storage, load: SteadyLoad, low: int, high: int, timeout_s: float = 150.0) -> None:
        self.load = load
        self.low = low
        self.high = high
        self.timeout_s = timeout_s
        self._events, self._metrics = LineReader(run, EVENTS), LineReader(run, METRICS)
        self._world_size = 0
        self._ended: str | None = None

    def round(self, workers: int, *, replicas: int = 1, hold_s: float = 0.0, rest_s: float = 0.0) -> Round:
        """Let the load rise until a replica more answers, and fall until the job has its workers again.

        Args:
            workers: of the job before.
            replicas: of the app before.
            hold_s, rest_s: how long the load stays high after that, and low.

        Raises:
            ShoalError: that did not happen in time, or training gave nothing up.
        """
        self.until_workers(workers)
        rose = time.time()
        self.load.level = self.high
        self._until(
            lambda: len(self.load.replicas_since(rose)) > replicas,
            f"{replicas + 1} replicas did not answer under load",
        )
        self.pause(hold_s)
        under_load = self.world_size
        fell = time.time()
        self.load.level = self.low
        if under_load >= workers:
            raise ShoalError(f"training gave nothing up: it steps with {under_load} workers under load")
        self.until_workers(workers)
        self.pause(rest_s)
        return Round(rose, fell, time.time(), workers, under_load)

    def again(self, like: Round) -> Round:
        """Let the load rise and fall for as long as it did in another round."""
        before, rose = self.world_size, time.time()
        self.load.level = self.high
        self.pause(like.fell - like.rose)
        under_load, fell = self.world_size, time.time()
        self.load.level = self.low
        self.pause(like.ended - like.fell)
        return Round(rose, fell, time.time(), before, under_load)

    @property
    def world_size(self) -> int:
        """Of the job's last step; 0 before the first."""
        for line in self._metrics.new():
            self._world_size = line["world_size"]
        return self._world_size

    def until_workers(self, workers: int) -> None:
        """Wait until the job steps with so many workers.

        Raises:
            ShoalError: it did not in time.
        """
        self._until(lambda: self.world_size == workers, f"the job did not step with {workers} workers")

    def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline, pause = time.monotonic() + self.timeout_s, threading.Event()
        while not condition():
            for event in self._events.new():
                if event["kind"] == "finished":
                    raise ShoalError(f"{otherwise}: it has {event['status']} ({event['error']})")
            if time.monotonic() >= deadline:
                raise ShoalError(f"{otherwise} within {self.timeout_s:.0f} s: {self._how_it_stands()}")
            pause.wait(_LOOK_S)

    def _how_it_stands(self) -> str:
        """What a client saw, and why job and app have what they have."""
        from cluster.sharing.client import BrokerClient  # takes Ray with it

        failures = self.load.failures
        said = [f"{len(self.load.answers)} requests were answered, {len(failures)} failed"]
        said += [failure.reason for failure in failures[:3]]
        try:
            broker = BrokerClient()
            explained = [broker.explain(lease["holder"]) for lease in broker.leases()]
            said += [row["text"] for row in explained if row is not None]
        except ShoalError as error:  # which may be why
            said.append(str(error))
        return "; ".join(said)

    def pause(self, seconds: float) -> None:
        """Let time pass, which is what a load is made of, while the job goes on."""
        ended = time.monotonic() + seconds
        while (left := ended - time.monotonic()) > 0:
            threading.Event().wait(min(left, _LOOK_S))
            for event in self._events.new():
                if event["kind"] == "finished":
                    raise ShoalError(f"the job has {event['status']} ({event['error']})")


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
