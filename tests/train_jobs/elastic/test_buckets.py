"""Buckets in which gradients travel, with a peer that is played."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from train_jobs.elastic.buckets import GradientBuckets
from train_jobs.elastic.exchange import Exchange

PEERS = 0.5
"""Each gradient of the peer."""


class PlayedExchange(Exchange):
    """A peer whose gradients are all the same comes when it is waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), 1.0)
        self.started: list[Tensor] = []

    @property
    def alone(self) -> bool:
        return False

    def start(self, tensor: Tensor) -> Callable[[], None]:
        self.started.append(tensor)
        return lambda: None if self.failure else self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        tensor += PEERS


def step(module: nn.Module, buckets: GradientBuckets, *inputs: Tensor) -> None:
    """One step of as many micro-batches."""
    module.zero_grad(set_to_none=True)
    for index, each in enumerate(inputs):
        if index == len(inputs) - 1:
            buckets.arm()
        module(each).sum().backward()
    buckets.finish()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("as_view", [True, False])
def test_sums_take_the_place_of_gradients_step_after_step(as_view: bool) -> None:
    module, alone, exchange = model(), model(), PlayedExchange()
    buckets = GradientBuckets([*module.parameters()], exchange, 32, gradient_as_bucket_view=as_view)
    for scale in (1.0, 3.0):
        inputs = [torch.ones(5, 3) * scale, torch.ones(2, 3)]
        step(module, buckets, *inputs)
        alone.zero_grad()
        sum(alone(each).sum() for each in inputs).backward()
        for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad + PEERS)


def test_gradients_lie_in_the_buckets_unless_they_must_not() -> None:
    for as_view in (True, False):
        module, exchange = model(), PlayedExchange()
        buckets = GradientBuckets([*module.parameters()], exchange, 1e6, gradient_as_bucket_view=as_view)
        step(module, buckets, torch.ones(1, 3))
        (bucket,) = exchange.started
        within = [each.grad.untyped_storage().data_ptr() == bucket.data_ptr() for each in module.parameters()]
        assert within == [as_view] * 4


def test_what_travels_in_another_precision_is_put_back_in_the_gradients_own() -> None:
    module, exchange = model(), PlayedExchange()
    step(module, GradientBuckets([*module.parameters()], exchange, 1e6, torch.bfloat16), torch.ones(1, 3))
    assert exchange.started[0].dtype == torch.bfloat16
    assert {each.grad.dtype for each in module.parameters()} == {torch.float32}
    torch.testing.assert_close(module[1].bias.grad, torch.full((2,), 1 + PEERS))


def test_a_gradient_is_laid_out_as_its_parameter_is() -> None:
    module, exchange = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last), PlayedExchange()
    step(module, GradientBuckets([*module.parameters()], exchange, 1e6), torch.ones(1, 3, 2, 2))
    assert module.weight.grad.stride() == module.weight.stride()
    torch.testing.assert_close(module.weight.grad, torch.full((2, 3, 2, 2), 1 + PEERS))


def test_who_did_not_use_a_parameter_takes_what_the_peers_found() -> None:
    module, exchange = model(), PlayedExchange()
    module.register_parameter("unused", nn.Parameter(torch.ones(2)))
    step(module, GradientBuckets([*module.parameters()], exchange, 1e6), torch.ones(1, 3))
    torch.testing.assert_close(module.unused.grad, torch.full((2,), PEERS))


def test_buckets_leave_in_the_same_order_while_backward_runs() -> None:
    module, exchange = model(), PlayedExchange()
    buckets = GradientBuckets([*module.parameters()], exchange, 24)
    before: list[int] = []
    module[0].weight.register_hook(lambda _: before.append(len(exchange.started)))
    step(module, buckets, torch.ones(1, 3))
    assert [len(each) for each in exchange.started] == [2, 8, 4, 12], "one a parameter, the last one first"
    assert before[0] >= 2, "those of the second layer had left by then"


def test_an_exchange_that_was_given_up_cannot_write_into_the_next_step() -> None:
    module, exchange = model(), PlayedExchange()
    buckets = GradientBuckets([*module.parameters()], exchange, 1e6)
    exchange.failure = RuntimeError("a peer is lost")
    step(module, buckets, torch.ones(1, 3))
    exchange.failure = None
    step(module, buckets, torch.ones(1, 3))
    late, now = exchange.started
    late.fill_(float("nan"))
    assert torch.isfinite(now).all()
    assert all(torch.isfinite(each.grad).all() for each in module.parameters())
