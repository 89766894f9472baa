"""Gradients travel across the groups in buckets while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train_jobs.elastic.exchange import Exchange
from train_jobs.optimization.gradients import local_part


class GradientBuckets:
    """The gradients of one rank, summed over its peers in the other groups.

    As DistributedDataParallel does it (Li et al., VLDB 2020, section 3.2.3): gradients come about in the
    reverse order of the forward pass, and a bucket leaves when its last one is there. Which parameter is in
    which bucket follows from the model alone, never from what happened to be ready first, so that a group
    that joins has the buckets of the others. Works for whole gradients and for FSDP2's shards alike.

    Args:
        parameters: those that are trained, in the model's order.
        capacity_bytes: of one bucket.
        dtype: what travels in place of the gradients' own precision; None for that.
        gradient_as_bucket_view: let gradients lie in the buckets where they can.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        exchange: Exchange,
        capacity_bytes: float,
        dtype: torch.dtype | None = None,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        self._exchange = exchange
        trained = [each for each in reversed(parameters) if each.requires_grad]
        self._buckets = _cut(trained, capacity_bytes, dtype, gradient_as_bucket_view)
        self._bucket_of = {id(each): bucket for bucket in self._buckets for each in bucket.parameters}
        self._armed = False
        self._begun: list[Callable[[], None]] = []
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def arm(self) -> None:
        """The next backward is the last of the step: what it completes travels."""
        self._armed = not self._exchange.alone
        self._begun = []
        for bucket in self._buckets:
            bucket.missing = {id(each) for each in bucket.parameters}

    def finish(self) -> None:
        """Send what backward left out, wait for all, and put the sums in place of the gradients.

        A parameter that this rank did not use contributes zeros, and takes what the others found.
        """
        if not self._armed:
            return
        self._armed = False
        while len(self._begun) < len(self._buckets):
            self._begin_next()
        for bucket, wait in zip(self._buckets, self._begun, strict=True):
            wait()
            if self._exchange.failure is None:
                bucket.unpack()
        if self._exchange.failure is not None:
            # An operation that was given up may still write, and gradients that lie there are dropped.
            for bucket in self._buckets:
                bucket.buffer = None

    def _ready(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        self._bucket_of[id(parameter)].missing.discard(id(parameter))
        # In the same order everywhere: peers match their collectives by it.
        while len(self._begun) < len(self._buckets) and not self._buckets[len(self._begun)].missing:
            self._begin_next()

    def _begin_next(self) -> None:
        bucket = self._buckets[len(self._begun)]
        self._begun.append(self._exchange.start(bucket.pack()))


class _Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, dtype: torch.dtype, as_view: bool) -> None:
        self.dtype = dtype
        self.parameters: list[nn.Parameter] = []
        self.missing: set[int] = set()
        self.buffer: Tensor | None = None
        self._as_view = as_view

    @torch.no_grad()
    def pack(self) -> Tensor:
        """The gradients, one after the other; from here on they lie there, where they can."""
        if self.buffer is None:
            locals_ = [local_part(each) for each in self.parameters]
            size = sum(each.numel() for each in locals_)
            self.buffer = torch.empty(size, dtype=self.dtype, device=locals_[0].device)
        for view, parameter in self._views():
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(local_part(parameter.grad))
            if self._holds(parameter):
                parameter.grad = view
        return self.buffer

    @torch.no_grad()
    def unpack(self) -> None:
        """Put the sums in place of the gradients that do not lie there."""
        gradients, views = [], []
        for view, parameter in self._views():
            if self._holds(parameter):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(local_part(parameter.grad))
            views.append(view)
        if gradients:
            torch._foreach_copy_(gradients, views)

    def _holds(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's gradient can lie in the buffer: of its type, and laid out as it is."""
        return (
            self._as_view
            and not isinstance(parameter, DTensor)
            and parameter.dtype == self.dtype
            and parameter.is_contiguous()
        )

    def _views(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        assert self.buffer is not None, "it was packed"
        locals_ = [local_part(each) for each in self.parameters]
        parts = self.buffer.split([each.numel() for each in locals_])
        for part, like, parameter in zip(parts, locals_, self.parameters, strict=True):
            yield part.view(like.shape), parameter


def _cut(
    parameters: Sequence[nn.Parameter], capacity_bytes: float, dtype: torch.dtype | None, as_view: bool
) -> list[_Bucket]:
    """Buckets of one dtype and device each, filled in the order given."""
    buckets: list[_Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        bucket, filled = filling.get(kind, (None, 0))
        size = local_part(parameter).numel() * parameter.element_size()
        if bucket is None or filled + size > capacity_bytes:
            bucket, filled = _Bucket(dtype or parameter.dtype, as_view), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        filling[kind] = (bucket, filled + size)
    return buckets
