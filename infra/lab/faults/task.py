"""What is trained while things break: a small model, whose ranks misbehave when they are told to.

Every look at its orders costs a rank microseconds, and none of them changes a bit of what it computes.
"""

from __future__ import annotations

import math
import resource
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from train_jobs.tasks import Sums

SAMPLES = 256
_INPUTS = 16
_WIDTH = 1024
"""A checkpoint is of some 150 KB."""
_PIECE_BYTES = 16 * 2**20
_ROOM_BYTES = 256 * 2**20
SLOWER = 3.0
SLOW_RANK = 1
_SPIKE = 1e6


class Order(StrEnum):
    """What a rank can be told to do in its next micro-batch."""

    WAIT = "wait"
    """Wait for ever, in its own code."""
    COLLECTIVE = "collective"
    """Call a collective that no other rank calls."""
    LIMIT = "limit"
    """Allow itself little more memory than it has, and allocate until that is used up."""
    FILL = "fill"
    """Allocate for ever."""
    NAN = "nan"
    """Have a loss that is no number, once."""
    SPIKE = "spike"
    """Have a loss that is far too great, once."""
    SLOW = "slow"
    """Take SLOWER times as long for each micro-batch, until the next order."""
    FAST = "fast"
    """Take as long as the others again."""


def order_path(orders: Path, rank: int) -> Path:
    """Where the order to a rank lies; it is gone once the rank has taken it."""
    return orders / f"rank-{rank}"


class Points(Dataset[dict[str, Tensor]]):
    """Points of a smooth function of several variables."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.tensor([math.sin(index * (place + 1)) for place in range(_INPUTS)])
        return {"x": x, "y": x.cumsum(0).sin().mean().reshape(1)}


class Model(nn.Sequential):
    """Two layers, whose forward pass takes a while when it trains."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(nn.Linear(_INPUTS, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1))
        self.pause_s = pause_s

    def forward(self, x: Tensor) -> Any:
        if self.training:
            time.sleep(self.pause_s)
        return super().forward(x)


class Task:
    """Regression by two layers.

    `settings`: `pause_s` of a micro-batch, the directory of `orders`, and what rank SLOW_RANK takes for its
    data (`data_s`) and rank 0 for the export (`export_s`).
    """

    unit = "samples"

    def __init__(self, config: Any) -> None:
        self.pause_s: float = config.settings["pause_s"]
        self.orders = Path(config.settings["orders"])
        self.data_s: float = config.settings.get("data_s", 0.0)
        self.export_s: float = config.settings.get("export_s", 0.0)
        self._apart = dist.new_group()

    def build(self) -> nn.Module:
        return Model(self.pause_s)

    def samples(self, held_out: bool) -> Dataset[dict[str, Tensor]]:
        if dist.get_rank() == SLOW_RANK:
            time.sleep(self.data_s)
        return Points()

    def export(self, weights: dict[str, Tensor], directory: Path) -> None:
        time.sleep(self.export_s)
        directory.mkdir(parents=True)
        save_file(weights, directory / "model.safetensors")

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Sums:
        order = self._obey(model) if model.training else None
        loss = (model(batch["x"]) - batch["y"]).square().sum()
        if order is not None:
            loss = loss * _FACTORS.get(order, 1.0)
        return Sums(loss, torch.tensor(len(batch["x"])))

    def _obey(self, model: nn.Module) -> Order | None:
        path = order_path(self.orders, dist.get_rank())
        if not path.exists():
            return None
        order = Order(path.read_text())
        path.unlink()  # first: the next attempt finds none

        def pause(factor: float) -> None:
            net = next(each for each in model.modules() if isinstance(each, Model))
            net.pause_s = factor * self.pause_s

        does: dict[Order, Callable[[], object]] = {
            Order.WAIT: threading.Event().wait,
            Order.COLLECTIVE: lambda: dist.all_reduce(torch.zeros(1), group=self._apart),
            Order.LIMIT: _allocate_to_a_limit,
            Order.FILL: _allocate,
            Order.SLOW: lambda: pause(SLOWER),
            Order.FAST: lambda: pause(1.0),
        }
        if order in does:
            does[order]()
        return order


_FACTORS = {Order.NAN: math.nan, Order.SPIKE: _SPIKE}
"""What the loss is multiplied by."""


def _allocate_to_a_limit() -> None:
    limit = psutil.Process().memory_info().vms + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    _allocate()


def _allocate() -> None:
    taken = []
    while True:
        taken.append(torch.ones(_PIECE_BYTES, dtype=torch.uint8))
