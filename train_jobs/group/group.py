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
from train_jobs.group.group_devices import GroupDevices, NoDevicesError
from train_jobs.group.job_agents import JobAgents
from train_jobs.group.outcome import GroupOutcome, RankFailure, first_line_of, rank_failure
from train_jobs.group.reports import Reports
from train_jobs.spec import GroupSpec

_PLACE = {"memory": 1.0}
"""What one Ray Train worker takes of its node: a byte. The devices are its rank's, see GroupDevices."""


@ray.remote(num_cpus=0, max_restarts=0)
class GroupRunner:
    """Calls `fit` in an actor of its own: killing the actor ends the Ray Train run."""

    def fit(
        self,
        spec: GroupSpec,
        own: Storage,
        agents: dict[str, ActorHandle],
        places: PlacementGroup,
        wait_s: float,
        stands_by: bool,
    ) -> GroupOutcome:
        from ray.train import (
            ControllerError,
            FailureConfig,
            RunConfig,
            ScalingConfig,
            TrainingFailedError,
            WorkerGroupError,
        )

        from train_jobs.group.trainer import GroupTrainer

        # Ranks stay in the job's working directory, where a script and its files are.
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
        # How soon an end is seen, and its devices are free: every 2 s by default.
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.25"
        # An actor more for every group, for what the broker sees: nodes that are drained.
        os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
        filesystem, path = own.pyarrow()
        # Nothing here imports torch: the ranks have processes of their own.
        trainer = GroupTrainer(
            _train_loop,
            train_loop_config={"spec": spec, "agents": agents, "wait_s": wait_s, "stands_by": stands_by},
            scaling_config=ScalingConfig(num_workers=spec.world_size, resources_per_worker=_PLACE),
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
            placement_group=places,
        )
        try:
            return GroupOutcome(trainer.fit().return_value)
        except WorkerGroupError as error:
            for each in error.worker_failures.values():
                if isinstance(each, NoDevicesError):
                    return _not_started(each)
            return GroupOutcome(
                "failed", [rank_failure(rank, e) for rank, e in error.worker_failures.items()]
            )
        except TrainingFailedError as error:
            cause = error.controller_failure if isinstance(error, ControllerError) else error
            return _not_started(cause)


def _train_loop(config: dict[str, Any]) -> str:
    from train_jobs.group.worker import run_worker

    return run_worker(**config)


def _not_started(why: Exception) -> GroupOutcome:
    trace = "".join(traceback.format_exception(why))
    return GroupOutcome("failed", [RankFailure(None, None, type(why).__name__, str(why), trace)])


def _reserve_places(spec: GroupSpec) -> PlacementGroup:
    """Where the workers of a group are: its nodes, whether devices are free there or not."""
    return placement_group(
        [_PLACE] * spec.world_size,
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": node} for node in spec.nodes],
    )


class Group:
    """The driver's handle on one group: started, waited for, and started again after a failure.

    Args:
        agents: those of the job.
    """

    def __init__(self, agents: JobAgents) -> None:
        self._agents = agents
        self._spec: GroupSpec | None = None
        self._actor: ActorHandle | None = None
        self._places: PlacementGroup | None = None
        self._devices: GroupDevices | None = None
        self._reports: Reports | None = None
        self._ended: ray.ObjectRef | None = None
        self._left = False
        self._taken_down = False

    def start(self, spec: GroupSpec, own: Storage, *, wait_s: float = 0.0) -> None:
        """Start the workers; the group must not be running.

        Args:
            own: where Ray Train keeps what is its own.
            wait_s: how long its devices may still be held by the group before it.
        """
        self._free()
        if self._stays_for(spec):
            self._devices = GroupDevices(spec, wait_s)
            self._agents.decide(self.spec, spec)
            self._begin(spec)
            return
        if self._actor is None or self.spec.nodes[0] != spec.nodes[0] or self._is_dead():
            self.kill()
            self._start_actor(spec.nodes[0])
        # An actor that is there already has imported everything: that saves the next attempt seconds.
        self._devices = GroupDevices(spec, wait_s)
        self._fit(spec, own, wait_s)
        self._begin(spec)

    def stand_by(self, spec: GroupSpec, own: Storage) -> None:
        """Start the workers on the nodes of a group; they wait for the first one that is started there.

        Args:
            spec: of a name that no group of the job has.
        """
        self._start_actor(spec.nodes[0])
        self._fit(spec, own, 0.0, stands_by=True)
        self._spec, self._left = spec, True

    def _fit(self, spec: GroupSpec, own: Storage, wait_s: float, *, stands_by: bool = False) -> None:
        assert self._actor is not None, "it was started"
        self._remove_places()
        # Made here, and not where they are used: they go with the driver at the latest.
        self._places = _reserve_places(spec)
        agents = self._agents.on(spec.nodes)
        self._ended = self._actor.fit.remote(spec, own, agents, self._places, wait_s, stands_by)

    def _start_actor(self, node: str) -> None:
        self._actor = GroupRunner.options(  # type: ignore[attr-defined]
            # Ray puts an actor without resources on any node, unless it is held to one: even on a node that
            # is gone, as long as Ray has not noticed.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()

    def _begin(self, spec: GroupSpec) -> None:
        self._spec, self._left = spec, False
        self._reports = None if spec.config.group_size is None else self._agents.reports(spec)

    def _stays_for(self, spec: GroupSpec) -> bool:
        """Whether its workers have left their devices, and wait for others on the same nodes."""
        return self._left and self.spec.nodes == spec.nodes and not self._is_over()

    def _is_dead(self) -> bool:
        """Whether what starts its workers has ended."""
        if self._ended is None or not self._is_over():
            return False
        try:
            ray.get(self._ended)
        except ray.exceptions.RayError:
            return True
        return False

    def _is_over(self) -> bool:
        return self._ended is None or bool(ray.wait([self._ended], timeout=0)[0])

    def go_on_as(self, spec: GroupSpec) -> None:
        """The workers that it has start the ranks of another attempt, on the devices that they have."""
        self._spec = spec

    @property
    def spec(self) -> GroupSpec:
        """What it was last started with."""
        assert self._spec is not None, "the group was not started"
        return self._spec

    @property
    def ended(self) -> ray.ObjectRef:
        """Ready when its workers have ended."""
        assert self._ended is not None, "the group was not started"
        return self._ended

    @property
    def calls(self) -> list[ray.ObjectRef]:
        """One of them is ready when the group may have ended."""
        return [self.ended, *(() if self._reports is None else self._reports.calls)]

    def has_ended(self) -> bool:
        """Whether its ranks have: all have left, or their workers have ended."""
        if self._reports is not None:
            self._reports.take()
            self._left = self._reports.num_left == self.spec.world_size
        return self._left or self._is_over()

    def outcome(self) -> GroupOutcome:
        """How the group ended; waits for the end."""
        if self._left and not self._is_over():
            return GroupOutcome("left")
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
        """Give the devices of a group that has ended back, and keep what starts the next one on its nodes:
        its workers, where they are there; whether there is anything to keep."""
        self._free()
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
            self._remove_places()
            self._agents.end(self.spec.name, self.spec.nodes)
        self._actor = self._ended = self._reports = None
        self._left = self._taken_down = False

    def _free(self) -> None:
        """Give the devices back."""
        if self._devices is not None:
            self._devices.give_back()
        self._devices = None

    def _remove_places(self) -> None:
        """What is there of its workers is killed."""
        if self._places is not None:
            remove_placement_group(self._places)
        self._places = None


def first_ended(
    groups: Sequence[Group], timeout_s: float, news: Sequence[ray.ObjectRef] = ()
) -> Group | None:
    """One of these groups that has ended, or None when all still run after `timeout_s`, or at other news."""
    by_call = {call: group for group in groups for call in group.calls}
    done, _ = ray.wait([*by_call, *news], timeout=timeout_s)
    group = by_call.get(done[0]) if done else None
    return group if group is not None and group.has_ended() else None
