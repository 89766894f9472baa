"""A run of Ray Train on devices that the driver has reserved; what is private in Ray Train stands here alone.

Tests fail when Ray changes it (`tests/integration/test_group.py`, and all that train on a cluster).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.train import Result
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import WorkerGroup, worker_group
from ray.train.v2._internal.execution.worker_group import state as worker_group_state
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import PlacementGroup

_NOBODY = "nobody"
"""In place of the handle on Ray Train's actor where workers meet; it travels to the worker."""
_end_meeting = worker_group_state._shutdown_sync_actor


def _end_unless_nobody(handle: object) -> None:
    if handle != _NOBODY:
        _end_meeting(handle)


worker_group_state._shutdown_sync_actor = _end_unless_nobody


class _NoMeeting:
    """In place of the actor's class."""

    @classmethod
    def options(cls, **_: object) -> type[_NoMeeting]:
        return cls

    @classmethod
    def remote(cls, **_: object) -> str:
        return _NOBODY


@contextmanager
def _without_meeting(alone: bool) -> Iterator[None]:
    """Meanwhile Ray Train starts no such actor, where a worker is alone."""
    actor = worker_group.SynchronizationActor
    if alone:
        worker_group.SynchronizationActor = _NoMeeting
    try:
        yield
    finally:
        worker_group.SynchronizationActor = actor


class GroupTrainer(DataParallelTrainer):
    """What TorchTrainer is made of, without torch, in the calling process and in a given placement group.

    Ray Train makes the placement group itself, in an actor for its controller. Where that is killed before
    the group is placed, nobody knows of it any more: it is placed when there is room, and holds devices
    until the job ends. Two more actors of each run would do nothing here: one reads Ray's datasets, the
    other removes placement groups, and stays for ever, idle, when the controller was killed. A third one is
    where workers meet: one worker meets nobody.

    Args:
        placement_group: one bundle for each worker; the caller removes it.
    """

    def __init__(self, *arguments: Any, placement_group: PlacementGroup, **options: Any) -> None:
        super().__init__(*arguments, **options)

        class ReservedWorkerGroup(WorkerGroup):
            def _create_placement_group(self, *_: object) -> DefaultPlacementGroupHandle:
                return DefaultPlacementGroupHandle(placement_group)

            def _start_impl(self, *arguments: Any) -> None:
                with _without_meeting(self._worker_group_context.num_workers == 1):
                    super()._start_impl(*arguments)

        class Controller(TrainController):
            worker_group_cls = ReservedWorkerGroup

        self._controller_cls = Controller

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        idle = (DatasetsCallback, PlacementGroupCleanerCallback)
        return [each for each in super()._create_default_callbacks() if not isinstance(each, idle)]

    def _initialize_and_run_controller(self, **options: Any) -> Result:
        controller = self._controller_cls(**options)
        asyncio.run(controller.run())
        return controller.get_result()
