"""One job from submission to finish: lease, group, recovery, publication."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Collection, Iterable, Sequence
from types import FrameType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config.train_section import TrainJobConfig
from cluster.errors import RequestError, ShoalError
from cluster.registry import Registry
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand, Grant
from cluster.storage import Storage
from train_jobs.checkpoint.store import CheckpointStore
from train_jobs.control import NAMESPACE, JobControl, control_name
from train_jobs.data.preparation import prepare_data
from train_jobs.failures import Failure, FailureBudget, FailureClass, classify
from train_jobs.group import Group, GroupOutcome, first_ended
from train_jobs.run_log import summarize
from train_jobs.spec import CHECKPOINTS, DATA, EXPORT, RAY_TRAIN, GroupSpec, plan_groups
from train_jobs.workspace import Workspace

_HEARTBEAT_S = 2.0


class Stopped(Exception):  # noqa: N818  (not an error)
    """The job was asked to stop."""


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
        self.control = JobControl.options(  # type: ignore[attr-defined]
            name=control_name(job),
            namespace=NAMESPACE,
            # Beside the driver: the loss of any other node must not take it away.
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            ),
        ).remote(self.run_storage.location)
        self.groups: list[Group] = []
        self.stop_asked = threading.Event()
        self.attempt = summarize(job, self.run_storage).attempts

    def run(self) -> int:
        """The exit code: 0 when the job succeeded, 2 when what it asked for was wrong."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            self._event("preparing", task=self.config.task, source=self.config.source, pid=os.getpid())
            self._prepare_data()
            try:
                self._train()
            finally:
                self._kill(self.groups)
                self._release()  # publishing needs no devices
            model = self._publish()
        except Stopped:
            return self._finish("stopped", 1)
        except ShoalError as error:
            return self._finish("failed", error.exit_code, error=str(error))
        except BaseException as error:
            self._finish("failed", 1, error=f"{type(error).__name__}: {error}")
            raise
        return self._finish("succeeded", 0, model=model)

    def _prepare_data(self) -> None:
        if self.config.task == "script" and not self.workspace.mounted:
            raise RequestError(
                "a script writes its files into a directory, so it needs storage that every node mounts; "
                f"{self.storage.location} is none"
            )
        self.workspace.fetch(DATA)
        prepare_data(self.config, self.workspace.directory / DATA)
        if not self.workspace.has(DATA):
            self.workspace.put(DATA)

    # -- lease, group, failure, again ------------------------------------------------------------------

    def _train(self) -> None:
        budget = FailureBudget(self.config.recovery.worker_failures)
        failed: Failure | None = None
        while True:
            grant = self._lease()
            self.attempt += 1
            if failed is not None:
                after = failed.failure_class
                self._event("recovered", attempt=self.attempt, after=after, workers=self._workers(grant))
            spec, outcome = self._run_groups(
                plan_groups(self.job, self.config, self.run_storage.location, self.attempt, grant.nodes)
            )
            if outcome.status == "finished":
                return
            if outcome.status == "stopped" or self.stop_asked.is_set():
                raise Stopped
            failed = self._judge(spec, outcome, budget)

    def _lease(self) -> Grant:
        """Wait for a grant between min and max workers."""
        workers = self.config.workers
        self._event("waiting", min=workers.min, max=workers.most)
        grant = self.broker.wait(
            self._demand(workers.min, workers.most), timeout_s=None, stop=self.stop_asked.is_set
        )
        if self.stop_asked.is_set():
            raise Stopped
        names = _node_names()
        self._event(
            "leased", workers=self._workers(grant), nodes=[names.get(node, node) for node in grant.nodes]
        )
        return grant

    def _demand(self, least: int, most: int, held: Sequence[str] = ()) -> Demand:
        """A lease on between `least` and `most` workers, by whole tensor-parallel groups.

        Args:
            held: node of every worker that runs, in rank order.
        """
        workers, tensor = self.config.workers, self.config.parallel.tensor
        unit = {"CPU": float(workers.cpus * tensor), "GPU": float(workers.gpus * tensor)}
        return Demand(
            holder=f"job/{self.job}",
            kind="training",
            unit={name: amount for name, amount in unit.items() if amount},
            min=least // tensor,
            max=most // tensor,
            held=tuple(held[::tensor]),
            # One group cannot lose a worker and go on: it has all of them or none.
            gang=max(1, least // tensor) if least == most else 1,
            priority=self.config.priority,
            weight=self.config.weight,
            accelerator=self.config.accelerator,
        )

    def _run_groups(self, specs: Sequence[GroupSpec]) -> tuple[GroupSpec, GroupOutcome]:
        """Run the groups of a grant and keep the lease alive meanwhile.

        Returns with the first group that failed, the others being killed, or with the last one to end.
        """
        while len(self.groups) < len(specs):
            self.groups.append(Group())
        running = self.groups[: len(specs)]
        for group, spec in zip(running, specs, strict=True):
            group.start(spec, self.run_storage.child(RAY_TRAIN))
        while True:
            ended = first_ended(running, _HEARTBEAT_S)
            if ended is not None:
                running.remove(ended)
                outcome = ended.outcome()
                if outcome.status == "failed" or not running:
                    self._kill(running)
                    return ended.spec, outcome
                continue
            self._renew(running)
            if self.stop_asked.is_set():
                self.control.stop.remote()
            alive = _alive_nodes()
            for group in running:
                if not alive >= set(group.spec.nodes):
                    # Ray Train would find out too, but later; nothing of this group is left to save.
                    self._kill(running)
                    return group.spec, GroupOutcome("failed")

    def _workers(self, grant: Grant) -> int:
        return grant.units * self.config.parallel.tensor

    @staticmethod
    def _kill(groups: Iterable[Group]) -> None:
        for group in groups:
            group.kill()

    def _release(self) -> None:
        """End the lease; one that cannot be ended now runs out by itself."""
        try:
            self.broker.release(f"job/{self.job}")
        except ShoalError as error:
            print(f"the lease could not be released: {error}", flush=True)

    def _renew(self, running: Iterable[Group]) -> None:
        """Keep the lease on what runs: a group asks for all of its workers or none, so the grant stays.

        A broker that is away is no reason to stop: it is rebuilt from what holders say.
        """
        held = [node for group in running for node in group.spec.nodes]
        try:
            self.broker.request(self._demand(len(held), len(held), held))
        except ShoalError as error:
            print(f"the lease could not be renewed: {error}", flush=True)

    def _alive(self, nodes: Collection[str]) -> set[str]:
        """Those of a failed group's nodes that are there; a dead worker may be the first sign."""
        alive = _alive_nodes() & set(nodes)
        try:
            return alive - set(self.broker.suspect(nodes))
        except ShoalError as error:
            print(f"whether the nodes are there is not known: {error}", flush=True)
            return alive

    def _judge(self, spec: GroupSpec, outcome: GroupOutcome, budget: FailureBudget) -> Failure:
        """Log the failure; return when the job may go on, raise when it may not."""
        failure = classify(outcome.failures, spec.nodes, self._alive(spec.nodes), _node_names())
        step = ray.get(self.control.last_step.remote(), timeout=60)
        self._event(
            "failed",
            attempt=spec.attempt,
            failure_class=failure.failure_class,
            rank=failure.rank,
            node=failure.node,
            step=failure.step if failure.step is not None else step,
            reason=failure.reason,
        )
        decision = budget.decide(failure, step)
        if not decision.again and failure.failure_class is FailureClass.REQUEST:
            raise RequestError(failure.reason)
        if not decision.again:
            trace = f"{failure.trace}\n" if failure.trace else ""
            raise ShoalError(f"{trace}{failure.reason} ({decision.reason})")
        if self.stop_asked.wait(decision.backoff_s):
            raise Stopped
        return failure

    # -- the end ------------------------------------------------------------------------------------------

    def _publish(self) -> str | None:
        """Publish the exported model once, however often this is tried; returns NAME@VERSION."""
        if self.config.publish is None:
            return None
        registry = Registry(self.storage)
        summary = summarize(self.job, self.run_storage)
        for version in registry.versions(self.config.publish):
            if version.job == self.job and version.step == self.config.steps:
                return f"{version.name}@{version.version}"
        self.workspace.fetch(EXPORT, anew=True)
        version = registry.publish(
            self.config.publish,
            self.workspace.directory / EXPORT,
            {
                "job": self.job,
                "step": self.config.steps,
                "evaluation": summary.evaluation,
                "config_digest": hashlib.sha256(self.config.model_dump_json().encode()).hexdigest(),
            },
        )
        self._event("published", model=f"{version.name}@{version.version}", path=version.path)
        return f"{version.name}@{version.version}"

    def _finish(self, status: str, exit_code: int, model: str | None = None, error: str | None = None) -> int:
        step = CheckpointStore(self.run_storage.child(CHECKPOINTS)).newest() or 0
        for scratch in (RAY_TRAIN, EXPORT) if status == "succeeded" else (RAY_TRAIN,):
            try:
                self.workspace.forget(scratch)
            except ShoalError as problem:  # it is in nobody's way
                print(f"{scratch} could not be deleted: {problem}", flush=True)
        self.workspace.clear()
        self._event("finished", status=status, step=step, model=model, error=error, exit_code=exit_code)
        if error is not None:
            print(error, flush=True)
        return exit_code

    # -- small things -------------------------------------------------------------------------------------

    def _event(self, kind: str, **facts: Any) -> None:
        ray.get(self.control.event.remote(kind, **facts), timeout=60)
        print(kind, *(f"{key}={value}" for key, value in facts.items() if value is not None), flush=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_asked.set()


def _alive_nodes() -> set[str]:
    """Ids of the nodes that Ray says are alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _node_names() -> dict[str, str]:
    """Names of all nodes by node id, of dead ones too."""
    return {
        node["NodeID"]: node["Labels"].get("shoal.io/node", node["NodeManagerAddress"])
        for node in ray.nodes()
    }
