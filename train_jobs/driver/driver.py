"""One job from submission to finish: lease, group, recovery, publication."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actors import NAMESPACE
from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Grant
from cluster.state.nodes import node_names
from train_jobs.checkpoint.store import CheckpointStore
from train_jobs.driver.data_errors import StoppedError
from train_jobs.driver.failure_budget import FailureBudget
from train_jobs.driver.failures import (
    MEMORY_ADVICE,
    SCRIPT_MEMORY_ADVICE,
    Failure,
    FailureClass,
    classify,
)
from train_jobs.driver.job_data import JobData
from train_jobs.driver.job_lease import JobLease
from train_jobs.driver.left_behind import Result, is_left_behind, unless_stopped
from train_jobs.driver.publication import Publication
from train_jobs.driver.replica_groups import ReplicaGroups
from train_jobs.driver.single_group import SingleGroup
from train_jobs.driver.work_directory import update_work
from train_jobs.elastic.lighthouse import start_lighthouse
from train_jobs.group.group import Group
from train_jobs.group.job_agents import JobAgents
from train_jobs.group.outcome import GroupOutcome
from train_jobs.group.standing_by import StandingBy
from train_jobs.records.control import JobControlActor, control_name
from train_jobs.records.run_log import summarize
from train_jobs.records.workspace import Workspace
from train_jobs.spec import (
    CHECKPOINTS,
    DATA,
    EXPORT,
    EXPORT_FACTS,
    PREPARED,
    RAY_TRAIN,
    WORK,
    GroupSpec,
    command_digest,
    group_spec,
    plan_groups,
)

_END_S = 30.0
"""What the end of a job waits for the storage: less than `shoal stop` gives a job."""


class Driver:
    """Runs one job inside the cluster.

    Args:
        job: the job's id, unique in the storage.
        storage: the cluster's storage.
    """

    def __init__(self, job: str, config: TrainJobConfig, storage: Storage) -> None:
        self.job = job
        self.config = config
        self.storage = storage
        self.run_storage = storage.child("jobs", job)
        self.workspace = Workspace(self.run_storage)
        self.broker = BrokerClient()
        self.lease = JobLease(job, config, self.broker)
        self.control = JobControlActor.options(
            name=control_name(job),
            namespace=NAMESPACE,
            # Beside the driver: the loss of any other node must not take it away.
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            ),
        ).remote(self.run_storage.location)
        self.agents = JobAgents(config)
        self.single = SingleGroup(
            self,
            self.lease,
            self.run_storage.child(RAY_TRAIN),
            self.agents,
            grace_s=self.broker.info()["reclaim_grace_s"],
        )
        self._standing_by = StandingBy()
        self.stop_asked = threading.Event()
        self.attempt = summarize(job, self.run_storage).attempts
        self.budget = FailureBudget(config.recovery, seed=job)

    def run(self) -> int:
        """The exit code: 0 when the job succeeded, 2 when what it asked for was wrong."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            try:
                self._stand_by()  # first of all: it goes on beside what follows
                self._event("preparing", task=self.config.task, source=self.config.source, pid=os.getpid())
                self._prepare_data()
                if self._unless_stopped(self._is_to_train, "what it has done is looked up"):
                    self._train()
            finally:
                self.single.kill()
                self._standing_by.only(())
                self.lease.release()  # publishing needs no devices
            model = self._unless_stopped(self._publish, "its model is published")
        except StoppedError:
            return self._finish("stopped", 1)
        except ShoalError as error:
            return self._finish("failed", error.exit_code, error=str(error))
        except BaseException as error:
            self._finish("failed", 1, error=f"{type(error).__name__}: {error}")
            raise
        return self._finish("succeeded", 0, model=model)

    def _stand_by(self) -> None:
        """Have workers start where the job would be granted devices now, and its lighthouse: that takes none,
        and longer than many a job's data."""
        nodes = self.lease.preview()
        if len(nodes) < self.lease.least:
            return
        self.agents.start(nodes)
        run, attempt = self.run_storage.location, self.attempt + 1
        for spec in plan_groups(self.job, self.config, run, attempt, nodes):
            group = Group(self.agents)
            group.stand_by(replace(spec, index=-1 - spec.index), self.run_storage.child(RAY_TRAIN))
            self._standing_by.add(group)
        if self.lease.units is not None:
            timeout_s = self.config.recovery.heartbeat_timeout_s
            self._standing_by.lighthouses[attempt] = start_lighthouse(self.job, attempt, None, timeout_s)

    def _is_to_train(self) -> bool:
        """False of a script that has run to its end before: it is only published."""
        scripted = self.config.task == "script"
        if scripted and summarize(self.job, self.run_storage).trained == command_digest(self.config):
            return False
        self.run_storage.delete(EXPORT_FACTS)  # of a model that was left before
        return True

    def _prepare_data(self) -> None:
        if self.config.task == "script" and not self.workspace.mounted:
            raise RequestError(
                "a script writes its files into a directory, so it needs storage that every node mounts; "
                f"{self.storage.location} is none"
            )
        if self.config.task == "script":
            work = self.workspace.directory / WORK
            self._unless_stopped(lambda: update_work(Path.cwd(), work), "the job's files are copied")
        notes = self.storage.child(PREPARED)
        changed = JobData(self, self.lease, self.run_storage.child(DATA), notes).prepare()

        def declare() -> None:
            if changed or not self.workspace.has(DATA):
                self.workspace.declare(DATA)

        self._unless_stopped(declare, "the job's data is declared to be there")

    def _unless_stopped(self, work: Callable[[], Result], words: str) -> Result:
        return unless_stopped(work, self.is_stopping, words)

    # -- lease, group, failure, again ------------------------------------------------------------------

    def _train(self) -> None:
        failed: Failure | None = None
        while True:
            grant = self.wait_for_lease()
            self.attempt += 1
            if failed is not None:
                after = failed.failure_class
                self._event("recovered", attempt=self.attempt, after=after, workers=self.lease.workers(grant))
            self._standing_by.only(grant.nodes)
            if self.lease.units is None:
                spec, outcome = self.single.run(grant, self.attempt, self._standing_by)
            else:
                spec, outcome = self._run_replicas(grant)
            if outcome.status == "finished":
                if self.config.task == "script":
                    self._event("trained", command=command_digest(self.config))
                return
            if outcome.status == "stopped" or self.stop_asked.is_set():
                raise StoppedError("the job was asked to stop")
            if outcome.status == "failed":
                failed, backoff_s = self._judge(spec, outcome)
                if self.stop_asked.wait(backoff_s):
                    raise StoppedError("the job was asked to stop")

    def wait_for_lease(self) -> Grant:
        """Wait for a grant between min and max workers."""
        workers = self.config.workers

        def say(reason: str | None = None) -> None:
            if reason is not None:
                self.single.give_up()  # nobody waits for devices that this job still has
            self._event("waiting", min=workers.min, max=workers.most, reason=reason)

        say()
        grant = self.lease.wait(self.stop_asked.is_set, say)
        if self.stop_asked.is_set():
            raise StoppedError("the job was asked to stop")
        self.agents.only(grant.nodes)
        self.agents.start(grant.nodes)
        names = node_names()
        self._event(
            "leased", workers=self.lease.workers(grant), nodes=[names.get(node, node) for node in grant.nodes]
        )
        return grant

    def _run_replicas(self, grant: Grant) -> tuple[GroupSpec, GroupOutcome]:
        """Run replica groups, as many as the grant pays for at any time, until the last one ends."""
        assert self.lease.units is not None, "the job has replica groups"
        supervisor = ReplicaGroups(
            self,
            self.lease,
            self.job,
            own=self.run_storage.child(RAY_TRAIN),
            agents=self.agents,
            grace_s=self.broker.info()["reclaim_grace_s"],
            heartbeat_timeout_s=self.config.recovery.heartbeat_timeout_s,
            standing_by=self._standing_by,
        )
        return supervisor.run(grant)

    # -- what is asked by those who prepare the data, and run the groups -----------------------------------

    def tell(self, kind: str, **facts: Any) -> None:
        """Log an event that is of no attempt."""
        self._event(kind, **facts)

    def is_stopping(self) -> bool:
        return self.stop_asked.is_set()

    def spec_for(self, grant: Grant, attempt: int) -> GroupSpec:
        """All workers that a grant pays for, as one group."""
        (spec,) = plan_groups(self.job, self.config, self.run_storage.location, attempt, grant.nodes)
        return spec

    def group_at(self, index: int, units: Sequence[str]) -> GroupSpec:
        """One more group of this attempt, on these nodes."""
        run = self.run_storage.location
        return group_spec(self.job, self.config, run, self.attempt, index, units)

    def judge(self, spec: GroupSpec, outcome: GroupOutcome, in_vain: int) -> float:
        """Log the failure of one of several groups; returns the seconds before it is started again."""
        return self._judge(spec, outcome, goes_on=True, in_vain=in_vain)[1]

    def event(self, kind: str, **facts: Any) -> None:
        """Log an event of this attempt."""
        self._event(kind, attempt=self.attempt, **facts)

    def has_started(self, attempt: int) -> bool:
        """Whether all ranks of an attempt of one group have met, and have their state."""
        return bool(ray.get(self.control.has_started.remote(attempt), timeout=60))

    def is_saving(self, group: str) -> bool:
        """Whether ranks of a group write to the storage now."""
        return bool(ray.get(self.control.is_saving.remote(group), timeout=60))

    def ask_to_stop(self) -> bool:
        """Whether the job is to stop; if so, its ranks are told."""
        if self.stop_asked.is_set():
            self.control.stop.remote()
        return self.stop_asked.is_set()

    def _judge(
        self, spec: GroupSpec, outcome: GroupOutcome, *, goes_on: bool = False, in_vain: int = 0
    ) -> tuple[Failure, float]:
        """Log a failure; returns it with the seconds to wait before another attempt.

        Args:
            goes_on: other groups of the job do.
            in_vain: how often in a row groups in its place have failed before they took part.

        Raises:
            ShoalError: the job may not go on.
        """
        advice = SCRIPT_MEMORY_ADVICE if self.config.task == "script" else MEMORY_ADVICE
        alive = self.lease.alive_of(spec.nodes)
        failure = classify(outcome.failures, spec.nodes, alive, node_names(), advice)
        calls = [self.control.last_step.remote(), self.control.script_saves.remote()]
        step, saves = ray.get(calls, timeout=60)
        self._event(
            "failed",
            attempt=spec.attempt,
            group=None if self.config.group_size is None else spec.name,
            goes_on=goes_on or None,
            failure_class=failure.failure_class,
            rank=failure.rank,
            node=failure.node,
            step=failure.step if failure.step is not None else step,
            reason=failure.reason,
        )
        if failure.failure_class is FailureClass.HANG and failure.trace:
            print(f"where rank {failure.rank} stood:\n{failure.trace}", flush=True)
        self.lease.blame(failure, step, elsewhere=goes_on or len(set(spec.nodes)) > 1)
        decision = self.budget.decide(failure, step, in_vain, saves)
        if not decision.again and failure.failure_class is FailureClass.REQUEST:
            raise RequestError(failure.reason)
        if not decision.again:
            plain = failure.failure_class is FailureClass.CHECKPOINT
            trace = f"{failure.trace}\n" if failure.trace and not plain else ""
            raise ShoalError(f"{trace}{failure.reason} ({decision.reason})")
        return failure, decision.backoff_s

    # -- the end ------------------------------------------------------------------------------------------

    def _publish(self) -> str | None:
        """Publish what was exported; returns NAME@VERSION."""
        if self.config.publish is None:
            return None
        publication = Publication(self.job, self.config, self.storage, self.workspace)
        version, is_new = publication.publish(summarize(self.job, self.run_storage))
        if is_new:
            self._event("published", model=version.reference, path=version.path)
        return version.reference

    def _finish(self, status: str, exit_code: int, model: str | None = None, error: str | None = None) -> int:
        step = ray.get(self.control.last_step.remote(), timeout=60)
        ends_at = time.monotonic() + _END_S

        def at_the_end(work: Callable[[], Result], words: str, otherwise: Result) -> Result:
            try:
                return unless_stopped(work, lambda: time.monotonic() > ends_at, words)
            except ShoalError as problem:  # the next run goes by what is there, and none of it is in its way
                print(f"not all could be done at the end: {problem}", flush=True)
                return otherwise

        if self.config.task != "script":
            checkpoints = CheckpointStore(self.run_storage.child(CHECKPOINTS))
            step = at_the_end(lambda: checkpoints.newest() or 0, "its checkpoints are listed", step)
        for scratch in (RAY_TRAIN, EXPORT) if status == "succeeded" else (RAY_TRAIN,):
            at_the_end(partial(self._forget, scratch), f"{scratch} is deleted", None)
        if not is_left_behind():  # it may read what this node has copied
            self.workspace.clear()
        self._event("finished", status=status, step=step, model=model, error=error, exit_code=exit_code)
        if error is not None:
            print(error, flush=True)
        return exit_code

    def _forget(self, scratch: str) -> None:
        self.workspace.forget(scratch)
        if scratch == EXPORT:
            self.run_storage.delete(EXPORT_FACTS)

    # -- small things -------------------------------------------------------------------------------------

    def _event(self, kind: str, **facts: Any) -> None:
        ray.get(self.control.event.remote(kind, **facts), timeout=60)
        print(kind, *(f"{key}={value}" for key, value in facts.items() if value is not None), flush=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_asked.set()
