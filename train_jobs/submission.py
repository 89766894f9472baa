"""Jobs as Ray's job API knows them: submitting, stopping, logs."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.connection import ClusterRecord, environment
from cluster.errors import ShoalError


def new_job_id(name: str) -> str:
    """A job's id: its name, the time (UTC) and a few random digits."""
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


class Submissions:
    """Ray's job API of one cluster.

    Raises:
        ShoalError: from every method, when the cluster does not answer.
    """

    def __init__(self, record: ClusterRecord) -> None:
        import os

        os.environ.update(environment(record))  # Ray reads the token's place from the environment only
        from ray.job_submission import JobSubmissionClient

        try:
            self.client = JobSubmissionClient(record.dashboard_url)
        except (ConnectionError, RuntimeError) as error:
            raise ShoalError(f"the job API of cluster {record.name} does not answer: {error}") from error

    def submit(self, job: str, name: str, attempt_of: int, working_dir: Path, leave_out: list[str]) -> str:
        """Package the working directory and start the job's driver; returns Ray's submission id.

        Args:
            attempt_of: how many times this job was submitted before.
            leave_out: paths under the working directory that are not packaged.
        """
        submission_id = job if attempt_of == 0 else f"{job}-r{attempt_of}"
        command = [sys.executable, "-m", "train_jobs", name, "--job", job, "--submission-id", submission_id]
        try:
            return self.client.submit_job(
                entrypoint=shlex.join(command),
                submission_id=submission_id,
                runtime_env={"working_dir": str(working_dir), "excludes": leave_out},
                metadata={"shoal_job": job, "shoal_name": name},
            )
        except (RuntimeError, ValueError, ConnectionError) as error:
            raise ShoalError(f"{name} could not be submitted: {error}") from error

    def statuses(self) -> dict[str, str]:
        """Ray's status (PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED) by submission id."""
        return {job.submission_id: str(job.status.value) for job in self.client.list_jobs() if job.submission_id}

    def status(self, submission_id: str) -> str | None:
        return self.statuses().get(submission_id)

    def message(self, submission_id: str) -> str:
        """What Ray says about how the driver ended."""
        return self.client.get_job_info(submission_id).message or ""

    def logs(self, submission_id: str) -> str:
        return self.client.get_job_logs(submission_id)

    def follow_logs(self, submission_id: str) -> Iterator[str]:
        import asyncio

        lines: Any = self.client.tail_job_logs(submission_id)
        loop = asyncio.new_event_loop()
        try:
            while True:
                try:
                    yield loop.run_until_complete(anext(lines))
                except StopAsyncIteration:
                    return
        finally:
            loop.close()

    def stop(self, submission_id: str) -> None:
        """SIGTERM to the driver, SIGKILL when it does not go."""
        self.client.stop_job(submission_id)
