"""Training jobs through the control API: listed, submitted, stopped, gone on with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.loader import RUN_FILE, LoadedConfig, change_job, mistakes_of_job
from cluster.config.sections.cluster import ClusterConfig, NodeConfig
from cluster.config.sections.root import ShoalConfig
from cluster.config.sections.train import TrainJobConfig
from cluster.errors import ConfigError, RequestError, ShoalError
from cluster.files.storage import Storage
from infra.api.checkpoints import checkpoints_of
from infra.tenant_book import TenantBook
from train_jobs.checkpoint.store import CheckpointStore
from train_jobs.driver.package import Package
from train_jobs.driver.submission import Submissions, new_job_id, record_end
from train_jobs.records.job_status import RAY_ENDED, is_running
from train_jobs.records.job_table import JobTable
from train_jobs.records.listing import find_job, result_of, run_of
from train_jobs.records.run_config import changes, read_run_config
from train_jobs.records.run_log import RunFollower, RunSummary, summarize
from train_jobs.spec import CHECKPOINTS, command_digest

END_LOOK_S = 0.3
STOP_TIMEOUT_S = 150.0
"""More than Ray gives a driver between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted."""

    job: str
    submission_id: str


class Jobs:
    """The jobs of a cluster. Not tied to a thread.

    Args:
        cluster: its section of the config, paths resolved.
        storage: the cluster's.
        submissions: finds Ray's job API, once it is needed.
        nodes: what there is to run on.
        book: keeps what is needed to go on with them on other nodes; None where the nodes stay.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        storage: Storage,
        submissions: Callable[[], Submissions],
        nodes: Callable[[], tuple[NodeConfig, ...]],
        book: TenantBook | None = None,
    ) -> None:
        self._cluster = cluster
        self._storage = storage
        self.table = JobTable(storage)
        self._submissions = submissions
        self._nodes = nodes
        self._book = book

    def list(self) -> list[dict[str, Any]]:
        """One row a job, oldest first."""
        return self.table.rows(self._submissions().statuses())

    def result(self, job: str) -> dict[str, Any]:
        """What `shoal train` returns, as far as the job is."""
        found = find_job(self._storage, job)
        summary = summarize(found, run_of(self._storage, found))
        if summary.ended:
            return result_of(self._storage, found)
        statuses = self._submissions().statuses()
        if is_running(summary, statuses):
            return result_of(self._storage, found, status=summary.status)
        status = statuses.get(summary.submission_id or "")
        message = (
            self._submissions().message(summary.submission_id or "") if status else "Ray does not know it"
        )
        ended = "stopped" if status == "STOPPED" else "failed"
        return result_of(self._storage, found, ended, f"the driver ended: {message}")

    def checkpoints(self, job: str) -> dict[str, Any]:
        """The checkpoints of a job, the oldest first."""
        return checkpoints_of(self._storage, job)

    def submit(
        self, name: str, config: TrainJobConfig, package: Package, environment: Mapping[str, str]
    ) -> Submitted:
        """Start a job.

        Args:
            config: its section, paths resolved.
            package: what travels with it.
            environment: what its `env` passes on of whoever submits it.

        Raises:
            ConfigError: it does not fit the nodes, or what it names is not there.
            RequestError: a variable that should be passed on was not sent.
        """
        self._check(name, config, package.base)
        job = new_job_id(name)
        self._keep(job, package, environment)
        self._submissions().submit_package(
            self._storage, job, name, config, job, package, environment=environment
        )
        return Submitted(job, job)

    def stop(self, job: str) -> dict[str, Any]:
        """Have a job stop: its workers save at the next step boundary and leave.

        Returns:
            {"job", "submission_id"}; that it has ended, its events tell.

        Raises:
            RequestError: there is none, or it does not run.
        """
        submissions = self._submissions()
        statuses = submissions.statuses()
        found = find_job(self._storage, job, prefer=lambda summary: is_running(summary, statuses))
        follower = RunFollower(found, run_of(self._storage, found))
        summary = follower.look()
        if not is_running(summary, statuses) or summary.submission_id is None:
            raise RequestError(f"{found} does not run: it {_ended(summary.status)}")
        submissions.stop(summary.submission_id)
        waiting = (follower, summary.submission_id, submissions)
        threading.Thread(target=self._record_end, args=waiting, name=f"stop-{found}", daemon=True).start()
        return {"job": found, "submission_id": summary.submission_id}

    def _record_end(self, follower: RunFollower, submission_id: str, submissions: Submissions) -> None:
        """Say how a job ended whose driver was killed before it could."""
        deadline, pause = time.monotonic() + STOP_TIMEOUT_S, threading.Event()
        while time.monotonic() < deadline:
            try:
                driver = submissions.status(submission_id)  # before the look at what it wrote
                summary = follower.look()
                if summary.ended:
                    return
                if driver in RAY_ENDED:
                    why = "its driver was killed before it could say how it ended"
                    record_end(self._storage, summary.job, "stopped", why)
                    return
            except ShoalError:
                pass  # whoever follows the job is told so
            pause.wait(END_LOOK_S)

    def plan_to_resume(self, job: str, settings: Sequence[str], base: Path) -> ResumePlan:
        """What going on with a job would mean.

        Args:
            settings: changes of its config, as `--set` takes them.
            base: where relative paths of these start.

        Raises:
            RequestError: it runs, or there is nothing left to do.
            ConfigError: the changes do not fit.
        """
        found = find_job(self._storage, job)
        run = run_of(self._storage, found)
        summary = summarize(found, run)
        if is_running(summary, self._submissions().statuses()):
            raise RequestError(f"{found} runs: it is at step {summary.step}")
        name, before = read_run_config(self._storage, found)
        config = before
        if settings:
            around = LoadedConfig(ShoalConfig(cluster=self._cluster), base / "shoal.yaml")
            config = change_job(run.read_bytes(RUN_FILE).decode(), name, settings, around)
        said = [f"changed {change}" for change in changes(before, config)]
        said.append(_goes_on(found, name, config, summary, run))
        return ResumePlan(found, name, config, said)

    def resume(self, plan: ResumePlan, package: Package, environment: Mapping[str, str]) -> Submitted:
        """Go on with a job that ended early, from its newest checkpoint.

        Args:
            package, environment: as for `submit`.
        """
        self._keep(plan.job, package, environment)
        submission_id = f"{plan.job}-{time.strftime('%H%M%S', time.gmtime())}"
        self._submissions().submit_package(
            self._storage, plan.job, plan.name, plan.config, submission_id, package, environment=environment
        )
        return Submitted(plan.job, submission_id)

    def _keep(self, job: str, package: Package, environment: Mapping[str, str]) -> None:
        if self._book is None:
            return
        for other in self._book.jobs():
            if other != job and summarize(other, run_of(self._storage, other)).ended:
                self._book.forget_job(other)
        self._book.keep_job(job, package, environment)

    def _check(self, name: str, config: TrainJobConfig, folder: Path) -> None:
        mistakes = mistakes_of_job(name, config, self._cluster, folder, self._nodes())
        if mistakes:
            raise ConfigError(mistakes)


@dataclass(frozen=True)
class ResumePlan:
    """A job that can go on.

    Attributes:
        said: what was changed, and where it goes on.
    """

    job: str
    name: str
    config: TrainJobConfig
    said: list[str]


def _goes_on(job: str, name: str, config: TrainJobConfig, summary: RunSummary, run: Storage) -> str:
    """Where a job goes on.

    Raises:
        RequestError: nothing is left to do.
    """
    scripted = config.task == "script"
    has_trained = scripted and summary.trained == command_digest(config)
    if summary.status == "succeeded" and has_trained:
        raise RequestError(
            f"the script of {job} has succeeded, and is not run again; `shoal train {name}` starts anew"
        )
    if summary.status == "succeeded" and not scripted and config.steps <= summary.step:
        raise RequestError(
            f"{job} has done all its {summary.step} steps; --set steps=N with more steps goes on from there"
        )
    if has_trained:
        return "its script has succeeded: what is left is to publish the model"
    if scripted:
        return "its script starts again, and goes on from what it has saved"
    newest = CheckpointStore(run.child(CHECKPOINTS)).newest()
    return "begins at step 0: there is no checkpoint" if newest is None else f"goes on from step {newest}"


def _ended(status: str) -> str:
    return {"stopped": "was stopped"}.get(status, status)
