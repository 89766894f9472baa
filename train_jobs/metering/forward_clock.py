"""How long this rank's own part of a forward pass takes, without what it waits for others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_MOST_UNITS = 4
_MOST_SPANS = 16
"""Timed in a step, whatever the number of its micro-batches: the clock must not slow the step down."""


class ForwardClock:
    """Times units of a model in the forward passes of a step.

    Ranks that step together wait for each other in their collectives, so that a slow one cannot be told by
    the time of its steps. Within the forward pass of a unit nobody waits: FSDP2 has gathered its parameters
    before, and DistributedDataParallel reduces in backward. (Tensor and context parallelism do communicate
    within: the ranks of such a group look alike.)

    Args:
        units: the model's blocks where it is sharded by them, else the whole model; of more than a few, some.
    """

    def __init__(self, units: Sequence[nn.Module], device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        stride = -(-len(units) // _MOST_UNITS)
        timed = units[::stride] if stride else []
        self._most = max(1, _MOST_SPANS // max(1, len(timed)))
        """Micro-batches of a step that are timed."""
        self._running = False
        self._micro_batches = 0
        self._marks: list[Any] = []
        """When each timed forward pass began and ended, in turns."""
        for unit in timed:
            # FSDP2 gathers in its own hook, which comes before; after the pass it may wait again.
            unit.register_forward_pre_hook(self._mark)
            unit.register_forward_hook(self._mark, prepend=True)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around a forward pass that counts; backward may pass forward again, and does not."""
        if self._micro_batches == self._most:
            yield
            return
        self._micro_batches += 1
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def forget(self) -> None:
        """What was timed does not count."""
        self._marks, self._micro_batches = [], 0

    def take(self) -> float:
        """Seconds a micro-batch since the last call; 0 where nothing was timed.

        On a GPU what was timed has to be done: the caller has waited for the device.
        """
        marks, micro_batches = self._marks, self._micro_batches
        self.forget()
        if not micro_batches:
            return 0.0
        pairs = zip(marks[::2], marks[1::2], strict=False)
        if self._on_cuda:
            return sum(began.elapsed_time(ended) for began, ended in pairs) / 1e3 / micro_batches
        return float(sum(ended - began for began, ended in pairs)) / micro_batches

    def _mark(self, *_: Any) -> None:
        if not self._running:
            return
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
