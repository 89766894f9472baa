"""Jobs as Ray's job API knows them: submitting, stopping, logs.

The name of a logger of Ray's is private: where it changes, a line for each package is printed.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import ShoalError
from cluster.files.storage import Storage
from cluster.state.connection import ClusterRecord, point_at
from train_jobs.checkpoint.store import CheckpointStore
from train_jobs.driver.package import Package, package_of
from train_jobs.driver.work_directory import RECORD, update_work
from train_jobs.records.run_config import write_run_config
from train_jobs.records.run_log import RunLog, now
from train_jobs.spec import CHECKPOINTS, WORK, env_of, runtime_env_of

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

_MOST_NODES = 10_000
_PACKING = threading.Lock()


def new_job_id(name: str) -> str:
    """A job's id: its name, the time (UTC) and a few random digits."""
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def record_submission(
    storage: Storage, job: str, name: str, config: TrainJobConfig, submission_id: str | None
) -> None:
    """Make the job's directory, or open it again: its config, and the event that it was submitted."""
    write_run_config(storage, job, name, config)
    log = RunLog(storage.child("jobs", job))
    steps = 0 if config.task == "script" else config.steps  # a script says it, if anybody does
    log.event(now(), "submitted", name=name, steps=steps, submission_id=submission_id)
    log.close()


@contextmanager
def _staged(package: Package | None) -> Iterator[str]:
    """A directory with what travels, and nothing else: Ray packs it as it is.

    One at a time: how Ray packs is told it in the environment of the process.
    """
    with _PACKING:
        yield from _stage(package)


def _stage(package: Package | None) -> Iterator[str]:
    as_it_is = {"RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1", "RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES": ""}
    before = {name: os.environ.get(name) for name in as_it_is}
    with tempfile.TemporaryDirectory(prefix="shoal-package-") as directory:
        if package is None:
            Path(directory, RECORD).write_text("{}")  # an empty folder is no package; this file stays behind
        else:
            package.copy(Path(directory))
        os.environ.update(as_it_is)
        try:
            yield directory
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def record_end(storage: Storage, job: str, status: str, error: str) -> None:
    """Say how a job ended whose driver cannot say it."""
    run = storage.child("jobs", job)
    step = CheckpointStore(run.child(CHECKPOINTS)).newest()
    log = RunLog(run)
    log.event(now(), "finished", status=status, step=step or 0, error=error)
    log.close()


def driver_statuses(
    jobs: Iterable[JobDetails], living_nodes: Callable[[], Collection[str] | None]
) -> dict[str, str]:
    """What Ray says of each driver, by submission id; one whose node is gone has failed.

    Where the head died, and came back on a control store that outlived it, Ray says RUNNING of the drivers
    that were on it until the next job is submitted.

    Args:
        living_nodes: finds the ids of the nodes that are there; None when nobody says.
    """
    submitted = {job.submission_id: job for job in jobs if job.submission_id}
    statuses = {submission: str(job.status.value) for submission, job in submitted.items()}
    running = [submission for submission, status in statuses.items() if status == "RUNNING"]
    nodes = {each: node for each in running if (node := submitted[each].driver_node_id) is not None}
    living = living_nodes() if nodes else None
    if living is not None:
        statuses |= {submission: "FAILED" for submission, node in nodes.items() if node not in living}
    return statuses


class Submissions:
    """Ray's job API of one cluster.

    Args:
        joined: this process has joined the cluster, and so has found its address and token.

    Raises:
        ShoalError: from every method, when the cluster does not answer.
    """

    def __init__(self, record: ClusterRecord, *, joined: bool = False) -> None:
        if not joined:
            point_at(record)
        from ray.job_submission import JobSubmissionClient

        # It tells of every package it uploads, on a logger that it sets to INFO by itself.
        logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.WARNING)
        logging.getLogger("ray._private.runtime_env.packaging").setLevel(logging.WARNING)

        self._url = record.dashboard_url
        self._python, self._env = record.python, record.env
        try:
            self.client = JobSubmissionClient(self._url)
        except (ConnectionError, RuntimeError) as error:
            raise ShoalError(f"the job API of cluster {record.name} does not answer: {error}") from error

    def submit(
        self, storage: Storage, job: str, name: str, config: TrainJobConfig, submission_id: str, base: Path
    ) -> Package:
        """Record the job, package the working directory and start the job's driver.

        Args:
            storage: the cluster's storage.
            submission_id: Ray's id; a job that is submitted again needs a new one.
            base: the folder of the config file; it travels where the job names no other.

        Returns:
            what of that has travelled.

        Raises:
            RequestError: it is too large, or a variable that should be passed on is not set.
        """
        local = storage.local_path()
        package = package_of(config, config.folder(base), [] if local is None else [local])
        environment = env_of(config, os.environ)
        self.submit_package(storage, job, name, config, submission_id, package, environment=environment)
        return package

    def submit_package(
        self,
        storage: Storage,
        job: str,
        name: str,
        config: TrainJobConfig,
        submission_id: str,
        package: Package,
        *,
        environment: Mapping[str, str],
    ) -> None:
        """The same with what travels, and with the variables of `env` as they are where the job comes from.

        Raises:
            RequestError: it is too large, or a variable is missing.
        """
        local = storage.local_path()
        work = None if local is None or config.task != "script" else local / "jobs" / job / WORK
        if work is None:
            package.check()
        runtime_env = runtime_env_of(config, environment)
        variables = {**self._env, **runtime_env.get("env_vars", {})}
        if variables:
            runtime_env["env_vars"] = variables
        record_submission(storage, job, name, config, submission_id)
        if work is not None:
            # Into the storage, which all nodes mount, and through no package of Ray's: it may be of any size.
            update_work(package.base, work, package.files)
        try:
            with _staged(package if work is None else None) as directory:
                self.client.submit_job(
                    # `exec`: the process that Ray watches is the driver, not a shell around it.
                    entrypoint="exec " + shlex.join([self._python, "-m", "train_jobs", name, "--job", job]),
                    submission_id=submission_id,
                    runtime_env={**runtime_env, "working_dir": directory},
                    metadata={"shoal_job": job, "shoal_name": name},
                )
        except (RuntimeError, ValueError, OSError) as error:
            record_end(storage, job, "failed", f"it could not be submitted: {error}")
            raise ShoalError(f"{name} could not be submitted: {error}") from error

    def statuses(self) -> dict[str, str]:
        """Ray's status (PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED) by submission id."""
        return driver_statuses(self.client.list_jobs(), self._living_nodes)

    def _living_nodes(self) -> set[str] | None:
        """The ids of the nodes that Ray has not lost; None while it does not say."""
        from ray.util.state import list_nodes
        from ray.util.state.exception import RayStateApiException

        try:
            nodes = list_nodes(address=self._url, limit=_MOST_NODES)
        except (RayStateApiException, ConnectionError, RuntimeError):
            return None
        return {node.node_id for node in nodes if node.state == "ALIVE"}

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
