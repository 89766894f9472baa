"""A run of Ray Train on devices that the driver has reserved; what is private in Ray Train stands here alone.

Tests fail when Ray changes it (`tests/integration/test_group.py`, and all that train on a cluster).
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.train import Result
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup, worker_group
from ray.train.v2._internal.execution.worker_group import state as worker_group_state
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import PlacementGroup

_NOBODY = "nobody"
"""In place of the handle on Ray Train's actor where workers meet; it travels to the worker."""
worker_group_state._shutdown_sync_actor = lambda _: None


class _NoMeeting:
    """In place of the actor's class, in a process that runs one group and no other training."""

    @classmethod
    def options(cls, **_: object) -> type[_NoMeeting]:
        return cls

    @classmethod
    def remote(cls, **_: object) -> str:
        return _NOBODY


worker_group.SynchronizationActor = _NoMeeting


class _AsReserved(FixedScalingPolicy):
    """As many workers as there are places, of which no autoscaler is told."""

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass


class GroupTrainer(DataParallelTrainer):
    """What TorchTrainer is made of, without torch, in the calling process and in a given placement group.

    Ray Train makes the placement group itself, in an actor for its controller. Where that is killed before
    the group is placed, nobody knows of it any more: it is placed when there is room, and holds devices
    until the job ends. More actors would do nothing here, and each is a process that has to start first: one
    reads Ray's datasets; one removes placement groups, and stays for ever, idle, when the controller was
    killed; one tells Ray's autoscaler what the workers need, which is nothing, and stays when the job has
    ended; one is where workers meet, which here they do at an agent of the job (train_jobs.group.job_agents).

    Args:
        placement_group: one bundle for each worker; the caller removes it.
    """

    def __init__(self, *arguments: Any, placement_group: PlacementGroup, **options: Any) -> None:
        super().__init__(*arguments, **options)

        class ReservedWorkerGroup(WorkerGroup):
            def _create_placement_group(self, *_: object) -> DefaultPlacementGroupHandle:
                return DefaultPlacementGroupHandle(placement_group)

        class Controller(TrainController):
            worker_group_cls = ReservedWorkerGroup

        self._controller_cls = Controller

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        idle = (DatasetsCallback, PlacementGroupCleanerCallback)
        return [each for each in super()._create_default_callbacks() if not isinstance(each, idle)]

    def _initialize_and_run_controller(self, **options: Any) -> Result:
        policy = _AsReserved(self.scaling_config)
        controller = self._controller_cls(**{**options, "scaling_policy": policy})
        asyncio.run(controller.run())
        return controller.get_result()
