"""What becomes of a driver, as Ray's job API and its list of nodes tell it together."""

from __future__ import annotations

from typing import Any, cast

from ray.job_submission import JobDetails, JobStatus

from train_jobs.driver.submission import driver_statuses


def job(submission: str | None, status: JobStatus, node: str | None = None) -> JobDetails:
    facts: dict[str, Any] = {"submission_id": submission, "status": status, "driver_node_id": node}
    return cast(JobDetails, JobDetails(type="SUBMISSION", entrypoint="", **facts))


def test_a_driver_that_runs_on_a_node_that_is_gone_has_failed() -> None:
    jobs = [
        job("there", JobStatus.RUNNING, "living"),
        job("gone", JobStatus.RUNNING, "dead"),
        job("done", JobStatus.SUCCEEDED, "dead"),
        job("waits", JobStatus.PENDING),
        job("starts", JobStatus.RUNNING),
        job(None, JobStatus.RUNNING, "dead"),
    ]
    assert driver_statuses(jobs, lambda: {"living"}) == {
        "there": "RUNNING",
        "gone": "FAILED",
        "done": "SUCCEEDED",
        "waits": "PENDING",
        "starts": "RUNNING",
    }


def test_ray_is_believed_while_nobody_says_which_nodes_are_there() -> None:
    assert driver_statuses([job("a", JobStatus.RUNNING, "dead")], lambda: None) == {"a": "RUNNING"}
