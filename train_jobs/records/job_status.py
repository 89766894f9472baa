"""Which jobs there are, and how each is: by its events, and by what Ray says of its driver."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.files.storage import Storage
from train_jobs.records.run_log import RunSummary

RAY_RUNS = ("PENDING", "RUNNING")
"""Ray's statuses of a submission that has not ended."""
RAY_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
"""Those of one that has."""


def job_ids(storage: Storage) -> list[str]:
    if not storage.exists("jobs"):
        return []
    return sorted(entry.name for entry in storage.entries("jobs") if entry.is_dir)


def is_running(summary: RunSummary, driver_statuses: Mapping[str, str] | None) -> bool:
    """Whether the job's driver is there; without a cluster no job runs."""
    if summary.ended or driver_statuses is None or summary.submission_id is None:
        return False
    return driver_statuses.get(summary.submission_id) in RAY_RUNS


def status_of(summary: RunSummary, driver_statuses: Mapping[str, str] | None) -> str:
    if summary.ended or is_running(summary, driver_statuses):
        return summary.status
    return "failed"
