"""A task whose weights rank 0 reads slowly: it never comes to the end of them."""

from __future__ import annotations

import threading
from pathlib import Path

import torch.distributed as dist
from torch import nn

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.rank import hanging_task


class Task(hanging_task.Task):
    def __init__(self, config: TrainJobConfig) -> None:
        super().__init__(config)
        self._builds = Path(config.data.source or "").with_name("builds")

    def build(self) -> nn.Module:
        if dist.get_rank() == 0:
            self._builds.touch()
            threading.Event().wait()
        return super().build()
