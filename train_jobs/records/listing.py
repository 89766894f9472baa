"""Jobs as their files tell them: what `shoal jobs` shows and what `shoal train` returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from cluster.errors import RequestError
from cluster.files.storage import Storage
from train_jobs.records.goodput import Goodput, goodput_of
from train_jobs.records.job_status import job_ids
from train_jobs.records.job_table import JobTable
from train_jobs.records.run_log import RunFollower, RunSummary, read_all_metrics, read_events, summary_of


def run_of(storage: Storage, job: str) -> Storage:
    """The directory of a job's files."""
    return storage.child("jobs", job)


def find_job(storage: Storage, job: str, prefer: Callable[[RunSummary], bool] = lambda _: True) -> str:
    """A job by its id, or the newest one of a name.

    Args:
        prefer: of several of a name the newest of those that this holds for, if it holds for any; it is asked
            of what their events tell.

    Raises:
        RequestError: there is none; the message names those that are there.
    """
    jobs = job_ids(storage)
    if job in jobs:
        return job
    of_name = [summary for summary in summaries(storage) if summary.name == job]
    if of_name:
        return max(of_name, key=lambda summary: (prefer(summary), summary.submitted_at)).job
    known = f"; there are {', '.join(jobs[-10:])}" if jobs else "; there are none yet"
    raise RequestError(f"no job {job!r} under {storage.location}{known}")


def summaries(storage: Storage) -> list[RunSummary]:
    """What the events of each job tell."""
    return [RunFollower(job, run_of(storage, job)).look() for job in job_ids(storage)]


def list_jobs(storage: Storage, driver_statuses: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """One row a job, oldest first.

    Args:
        driver_statuses: Ray's status of each submission, where the cluster is up: a job whose driver is gone
            without having said so is `failed`.
    """
    return JobTable(storage).rows(driver_statuses)


def account_of(storage: Storage, job: str, *, runs: bool) -> Goodput:
    """Where a job's time went.

    Args:
        runs: its driver is there, so that the time until now counts.
    """
    run = run_of(storage, job)
    return goodput_of(read_events(run), read_all_metrics(run), time.time() if runs else None)


def result_of(
    storage: Storage, job: str, status: str | None = None, error: str | None = None
) -> dict[str, Any]:
    """The document that `shoal train` returns when a job has ended.

    Args:
        status, error: what is known beside the files, where the driver died without a word.
    """
    run = run_of(storage, job)
    events, metrics = read_events(run), read_all_metrics(run)
    summary = summary_of(job, events, metrics)
    return {
        "job": job,
        "name": summary.name,
        "status": summary.status if summary.ended else (status or "failed"),
        "step": summary.step,
        "attempts": summary.attempts,
        "world_sizes": summary.world_sizes,
        "metrics": summary.metrics,
        "evaluation": summary.evaluation,
        "totals": summary.totals,
        **goodput_of(events, metrics).as_json(),
        "skipped": summary.skipped,
        "went_back": summary.went_back,
        "stragglers": summary.stragglers,
        "model": summary.model,
        "path": run.location,
        "error": summary.error if summary.ended else error,
    }
