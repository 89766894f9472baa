"""One replica group: one Ray Train run, its start, its end and its failures."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.files.storage import Storage
from train_jobs.group.job_agents import JobAgents
from train_jobs.group.outcome import GroupOutcome, RankFailure, first_line_of, rank_failure
from train_jobs.spec import GroupSpec


@ray.remote(num_cpus=0, max_restarts=0)
class GroupRunner:
    """Calls `fit` in an actor of its own: killing the actor ends the Ray Train run."""

    def fit(
        self,
        spec: GroupSpec,
        own: Storage,
        agents: dict[str, ActorHandle],
        devices: PlacementGroup,
        wait_s: float,
    ) -> GroupOutcome:
        from ray.train import (
            ControllerError,
            FailureConfig,
            RunConfig,
            ScalingConfig,
            TrainingFailedError,
            WorkerGroupError,
        )

        from train_jobs.group.backend import RankProcesses
        from train_jobs.group.trainer import GroupTrainer

        # Ranks stay in the job's working directory, where a script and its files are.
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
        # How soon an end is seen, and its devices are free: every 2 s by default.
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.25"
        # An actor more for every group, for what the broker sees: nodes that are drained.
        os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
        # Its devices may be another group's for so long. (Ray Train's own default for the rest.)
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(60.0 + wait_s)
        filesystem, path = own.pyarrow()
        # Nothing here imports torch: the ranks have processes of their own.
        trainer = GroupTrainer(
            _train_loop,
            train_loop_config={"spec": spec, "agents": agents},
            backend_config=RankProcesses(),
            scaling_config=ScalingConfig(
                num_workers=spec.world_size,
                use_gpu=spec.config.workers.gpus > 0,
                resources_per_worker=_resources(spec),
            ),
            run_config=RunConfig(
                name=f"attempt-{spec.attempt}-group-{spec.index}",
                storage_path=path,
                storage_filesystem=filesystem,
                # The driver decides about another attempt: it may have to be on other nodes. Ray Train would
                # try these again, for ever where a group could not start or a node was preempted.
                failure_config=FailureConfig(
                    max_failures=0, controller_failure_limit=0, max_preemption_failures=0
                ),
            ),
            placement_group=devices,
        )
        try:
            return GroupOutcome(trainer.fit().return_value)
        except WorkerGroupError as error:
            return GroupOutcome(
                "failed", [rank_failure(rank, e) for rank, e in error.worker_failures.items()]
            )
        except TrainingFailedError as error:
            cause = error.controller_failure if isinstance(error, ControllerError) else error
            trace = traceback.format_exc()
            return GroupOutcome("failed", [RankFailure(None, None, type(cause).__name__, str(cause), trace)])


def _train_loop(config: dict[str, Any]) -> str:
    from train_jobs.group.worker import run_worker

    return run_worker(config["spec"], config["agents"])


def _reserve(spec: GroupSpec) -> PlacementGroup:
    """Ask for the devices of a group, on the nodes that the grant says; they need not be free yet."""
    return placement_group(
        [_resources(spec)] * spec.world_size,
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": node} for node in spec.nodes],
    )


def _resources(spec: GroupSpec) -> dict[str, float]:
    """What one worker takes, in Ray's names."""
    workers = spec.config.workers
    resources = {"CPU": float(workers.cpus), "GPU": float(workers.gpus)}
    return {name: amount for name, amount in resources.items() if amount}


class Group:
    """The driver's handle on one group: started, waited for, and started again after a failure.

    Args:
        agents: those of the job.
    """

    def __init__(self, agents: JobAgents) -> None:
        self._agents = agents
        self._spec: GroupSpec | None = None
        self._actor: ActorHandle | None = None
        self._devices: PlacementGroup | None = None
        self._ended: ray.ObjectRef | None = None
        self._taken_down = False

    def start(self, spec: GroupSpec, own: Storage, *, wait_s: float = 0.0) -> None:
        """Start the workers; the group must not be running.

        Args:
            own: where Ray Train keeps what is its own.
            wait_s: how long its devices may still be held by the group before it.
        """
        if self._actor is None or self.spec.nodes[0] != spec.nodes[0]:
            self.kill()
            self._actor = GroupRunner.options(  # type: ignore[attr-defined]
                # Ray puts an actor without resources on any node, unless it is held to one: even on a node
                # that is gone, as long as Ray has not noticed.
                scheduling_strategy=NodeAffinitySchedulingStrategy(spec.nodes[0], soft=False)
            ).remote()
        # An actor that is there already has imported everything: that saves the next attempt seconds.
        self._free()
        self._spec = spec
        # Made here, and not where it is used: whoever else is killed, it goes, with the driver at the latest.
        self._devices = _reserve(spec)
        self._ended = self._actor.fit.remote(spec, own, self._agents.on(spec.nodes), self._devices, wait_s)

    def go_on_as(self, spec: GroupSpec) -> None:
        """The workers that it has start the ranks of another attempt."""
        self._spec = spec

    @property
    def spec(self) -> GroupSpec:
        """What it was last started with."""
        assert self._spec is not None, "the group was not started"
        return self._spec

    @property
    def ended(self) -> ray.ObjectRef:
        """Ready when the group has ended."""
        assert self._ended is not None, "the group was not started"
        return self._ended

    def outcome(self) -> GroupOutcome:
        """How the group ended; waits for the end."""
        try:
            outcome = ray.get(self.ended)
            self._agents.end(self.spec.name, self.spec.nodes)  # a rank that is stopped outlives its worker
            return outcome
        except ray.exceptions.RayError as error:
            self.kill()
            return GroupOutcome(
                "failed",
                [RankFailure(None, None, type(error).__name__, first_line_of(error), str(error), died=True)],
            )

    def rest(self) -> bool:
        """Give the devices of a group that has ended back, and keep what starts the next one on its node;
        whether there is anything to keep."""
        self._free()
        self._ended = None
        return self._actor is not None and not self._taken_down

    def take_down(self) -> None:
        """Kill the workers; the group ends a moment later, as a failure."""
        if self._actor is not None:
            ray.kill(self._actor)
            self._taken_down = True

    def kill(self) -> None:
        """End the group at once; Ray has its devices back a moment later."""
        if self._actor is not None:
            ray.kill(self._actor)
            self._free()
            self._agents.end(self.spec.name, self.spec.nodes)
        self._actor = self._ended = None
        self._taken_down = False

    def _free(self) -> None:
        """Give the devices back; what runs on them is killed."""
        if self._devices is not None:
            remove_placement_group(self._devices)
        self._devices = None


def first_ended(
    groups: Sequence[Group], timeout_s: float, news: Sequence[ray.ObjectRef] = ()
) -> Group | None:
    """One of these groups that has ended, or None when all still run after `timeout_s`, or at other news."""
    by_end = {group.ended: group for group in groups}
    done, _ = ray.wait([*by_end, *news], timeout=timeout_s)
    return by_end.get(done[0]) if done else None
