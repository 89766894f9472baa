"""The figures of a run, step by step and in total."""

from __future__ import annotations

import resource
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from train_jobs.metering.communication import CommunicationProfile

FIRST_WINDOW = 5
"""The first profiled step of an attempt: the ones before are slower than the rest."""
_MEDIANS = ("step_s", "samples_per_s", "tokens_per_s", "mfu", "data_wait")
"""Of a step's figures those of which an attempt has medians."""


class Meter:
    """Measures the steps of one rank; all ranks call it alike.

    Args:
        flops_per_sample: of forward and backward; None where it could not be counted.
        peak: FLOP/s of one device, and where the figure is from.
        world_size: ranks that take part in a step, of all groups.
        waited_s: seconds that steps have waited for data so far, as the loader counts them.
        profile_every_steps: one step in so many is profiled; None: none is.
    """

    def __init__(
        self,
        device: torch.device,
        flops_per_sample: float | None,
        peak: tuple[float, str],
        world_size: Callable[[], int],
        waited_s: Callable[[], float],
        profile_every_steps: int | None = None,
    ) -> None:
        self.device = device
        self.flops_per_sample = flops_per_sample
        self.device_flops, self.peak_from = peak
        self.world_size = world_size
        self.waited_s = waited_s
        self.profile_every_steps = profile_every_steps
        self.communication = CommunicationProfile(device)
        self.steps = 0
        self._began = self._waited = 0.0
        self._exposed: float | None = None
        self._memory = 0
        self._may_profile = True
        self._counted = 0
        self._most_memory = 0
        self._values: dict[str, array[float]] = {name: array("d") for name in _MEDIANS}
        """Of every step that counts, in eight bytes each: a job may have millions."""

    @contextmanager
    def step(self, *, may_profile: bool = True) -> Iterator[None]:
        """Around one step.

        Args:
            may_profile: false where another group does: each one's windows would slow down all of them.
        """
        self._may_profile = may_profile
        self.steps += 1
        self._began, self._waited = time.perf_counter(), self.waited_s()
        if not self.profiled:
            yield
            return
        with self.communication.window():
            yield

    @property
    def profiled(self) -> bool:
        """Whether this step is in a window: it is slower than others, and its rates do not count."""
        every = self.profile_every_steps
        return self._may_profile and every is not None and self.steps % every == FIRST_WINDOW

    def line(self, samples: int, tokens: int | None) -> dict[str, Any]:
        """The figures of the step that was just done; all ranks call this at the same place."""
        seconds = time.perf_counter() - self._began
        if self.profiled:
            self._share(seconds)
        line: dict[str, Any] = {
            "step_s": round(seconds, 6),
            "samples_per_s": round(samples / seconds, 3),
            "tokens_per_s": None if tokens is None else round(tokens / seconds, 3),
            "mfu": self._mfu(samples / seconds),
            "data_wait": round((self.waited_s() - self._waited) / seconds, 6),
            "communication": self._exposed,
            "peak_memory_bytes": max(self._memory, self._peak_memory()),
        }
        if self.profiled:
            line["profiled"] = True
        else:
            self._counted += 1
            self._most_memory = max(self._most_memory, line["peak_memory_bytes"])
            for name, values in self._values.items():
                if line[name] is not None:
                    values.append(line[name])
        return line

    def totals(self) -> dict[str, Any] | None:
        """The figures of all steps of this attempt: medians, which slow steps at the start do not move."""
        if not self._counted:
            return None
        medians = {
            name: float(np.median(values)) if values else None for name, values in self._values.items()
        }
        return {
            "steps": self._counted,
            **medians,
            "communication": self._exposed,
            "peak_memory_bytes": self._most_memory,
            "peak_flops": self.peak_flops,
            "peak_flops_from": self.peak_from,
        }

    def _share(self, seconds: float) -> None:
        """What the window showed, over all ranks: the mean of the exposed share, the most memory."""
        exposed = self.communication.exposed_s or 0.0
        share = torch.tensor([min(1.0, exposed / seconds)], dtype=torch.float64, device=self.device)
        memory = torch.tensor([self._peak_memory()], dtype=torch.float64, device=self.device)
        dist.all_reduce(share)
        dist.all_reduce(memory, op=dist.ReduceOp.MAX)
        self._exposed = round(share.item() / dist.get_world_size(), 6)
        self._memory = int(memory.item())

    @property
    def peak_flops(self) -> float:
        """Of all devices of the job together."""
        return self.device_flops * self.world_size()

    def _mfu(self, samples_per_s: float) -> float | None:
        if self.flops_per_sample is None:
            return None
        return round(self.flops_per_sample * samples_per_s / self.peak_flops, 6)

    def _peak_memory(self) -> int:
        """Of this rank so far: what CUDA's allocator had in use at most, or the process on a CPU."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
