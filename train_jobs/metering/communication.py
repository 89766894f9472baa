"""How much of a step is communication that computation does not hide, out of a profile of the step.

A collective is *exposed* while it is in flight and nothing computes on the device. On GPUs the profiler gives
NCCL's kernels and all others; on CPUs the collectives of gloo, which run in threads of their own, and torch's
operators. Only the steps of a window are profiled: outside of it nothing is measured, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from train_jobs.metering.intervals import Interval, uncovered


class _ProfilerEvent(Protocol):
    name: str
    device_type: DeviceType
    time_range: Any


class CommunicationProfile:
    """Profiles what runs inside of `window()`.

    Attributes:
        exposed_s: seconds of exposed communication in the last window.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.exposed_s: float | None = None

    @contextmanager
    def window(self) -> Iterator[None]:
        kinds = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds = [ProfilerActivity.CUDA]
        with profile(activities=kinds) as profiler:
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self.exposed_s = exposed_s(profiler.events() or (), self.device.type)


def exposed_s(events: Iterable[_ProfilerEvent], device_type: str) -> float:
    """Seconds in which a collective was in flight and nothing was computed."""
    communication: list[Interval] = []
    computation: list[Interval] = []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if device_type == "cuda":
            if event.device_type == DeviceType.CUDA:
                (communication if "nccl" in event.name.lower() else computation).append(span)
        elif event.name.startswith("gloo:"):
            communication.append(span)
        elif event.name.startswith("aten::"):
            computation.append(span)
    return uncovered(communication, computation) / 1e6
