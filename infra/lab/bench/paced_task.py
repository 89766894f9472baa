"""A training task that takes the time of a device and not a core's: it waits where one would compute."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from train_jobs.tasks.task import Sums

if TYPE_CHECKING:
    from cluster.config.sections.train import TrainJobConfig

WIDTH = 32
NUM_SAMPLES = 4096


class Numbers(Dataset[dict[str, Tensor]]):
    """Random vectors, [WIDTH] each, and their sums; the same on every rank."""

    def __init__(self, seed: int) -> None:
        self._inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self._inputs[index], "targets": self._inputs[index].sum()}


class PacedTask:
    """Learns sums: the forward pass of a micro-batch lasts `settings.sample_s` seconds a sample.

    Model, gradients, optimizer and what the ranks say to each other are real, and next to nothing. So several
    ranks train at once on one core as they would on a device each.
    """

    unit = "samples"

    def __init__(self, config: TrainJobConfig) -> None:
        self._seed = config.seed
        self._sample_s = float(config.settings["sample_s"])

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def samples(self, held_out: bool) -> Numbers:
        return Numbers(self._seed + held_out)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Sums:
        """The summed squared error; `inputs` is [samples, WIDTH], `targets` [samples]."""
        began = time.perf_counter()
        said = model(batch["inputs"])[:, 0]
        loss = (said - batch["targets"]).square().sum()
        left = began + len(said) * self._sample_s - time.perf_counter()
        time.sleep(max(0.0, left))
        return Sums(loss, len(said))
