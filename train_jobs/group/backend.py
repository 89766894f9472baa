"""What Ray Train is told of how ranks meet: nothing."""

from __future__ import annotations

from ray.train.backend import Backend, BackendConfig


class _SharedDevices(Backend):
    """Ranks of one node see one another's GPUs, between which they copy directly."""

    share_cuda_visible_devices = True


class RankProcesses(BackendConfig):
    """Ray Train starts the workers; their ranks meet by themselves (train_jobs.rank.process)."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _SharedDevices
