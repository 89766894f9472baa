"""All jobs of a storage, one row each, for whoever asks again and again: what is known is not read again."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.files.line_reader import LineReader
from cluster.files.storage import Storage
from train_jobs.records.goodput import goodput_of
from train_jobs.records.job_status import is_running, job_ids, status_of
from train_jobs.records.run_log import EVENTS, METRICS, MetricKey, RunSummary, metric_key, summary_of

MOST_AT_ONCE = 16
"""So many jobs are read side by side where a look takes a request to an object store."""


class JobHistory:
    """One job, read as far as its logs go.

    Args:
        run: its directory.
    """

    def __init__(self, job: str, run: Storage) -> None:
        self._job, self._run = job, run
        self._begin()

    def _begin(self) -> None:
        self._events_log, self._metrics_log = LineReader(self._run, EVENTS), LineReader(self._run, METRICS)
        self._events: list[dict[str, Any]] = []
        self._metrics: dict[MetricKey, dict[str, Any]] = {}
        self._ended: tuple[RunSummary, dict[str, Any]] | None = None
        """What is kept of a job that has ended: its logs may be long."""

    def look(self) -> None:
        """Read what is new.

        Raises:
            StorageError: the storage cannot be read.
        """
        events, metrics = self._events_log.new(), self._metrics_log.new()
        if self._ended is not None and (events or metrics):
            self._begin()  # it was gone on with
            events, metrics = self._events_log.new(), self._metrics_log.new()
        self._events += [event for event in events if "kind" in event]
        self._metrics.update({metric_key(line): line for line in metrics})

    def row(self, driver_statuses: Mapping[str, str] | None) -> dict[str, Any]:
        """The row of the last look; see `list_jobs`."""
        if self._ended is not None:
            summary, account = self._ended
            runs = False
        else:
            metrics = [self._metrics[key] for key in sorted(self._metrics)]
            summary = summary_of(self._job, self._events, metrics)
            runs = is_running(summary, driver_statuses)
            account = goodput_of(self._events, metrics, time.time() if runs else None).as_json()
            if summary.ended:
                self._ended = summary, account
                self._events, self._metrics = [], {}
        return {
            "job": self._job,
            "name": summary.name,
            "status": status_of(summary, driver_statuses),
            "step": summary.step,
            "steps": summary.steps or None,
            "workers": summary.workers if runs else 0,
            "attempts": summary.attempts,
            "submitted_at": summary.submitted_at,
            "path": self._run.location,
            **account,
        }


class JobTable:
    """The jobs of a storage. Not tied to a thread.

    Args:
        storage: the cluster's.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._jobs: dict[str, JobHistory] = {}

    def rows(self, driver_statuses: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """One row a job, oldest first; see `list_jobs`.

        Raises:
            StorageError: the storage cannot be read.
        """
        with self._lock:
            jobs = job_ids(self._storage)
            self._jobs = {
                job: self._jobs.get(job) or JobHistory(job, self._storage.child("jobs", job)) for job in jobs
            }
            if self._storage.appendable:
                for history in self._jobs.values():
                    history.look()
            else:
                with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
                    for _ in pool.map(JobHistory.look, self._jobs.values()):
                        pass
            rows = [history.row(driver_statuses) for history in self._jobs.values()]
        return sorted(rows, key=lambda row: row["submitted_at"])
