"""What backward computes anew, and that blocks are compiled: seen from inside of a block."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from train_jobs.parallel.activations import checkpoint_activations, compile_blocks


class Block(nn.Module):
    """A matrix product, and a count of how often it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.entered = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.entered += 1
        return torch.tanh(self.linear(inputs))


FORWARD = 2 * 4 * 8 * 8


@pytest.mark.parametrize(
    ("how", "entered", "products"),
    # Backward takes two products of its own; `full` repeats the forward's, `selective` keeps its result.
    [("none", 1, 3), ("full", 2, 4), ("selective", 2, 3)],
)
def test_backward_computes_anew_what_was_not_kept(how: str, entered: int, products: int) -> None:
    torch.manual_seed(0)
    block, plain = Block(), Block()
    plain.load_state_dict(block.state_dict())
    checkpoint_activations([block], how)
    inputs = torch.randn(4, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        block(inputs).sum().backward()
    assert block.entered == entered
    assert counter.get_total_flops() == products * FORWARD
    plain(inputs).sum().backward()
    assert torch.equal(block.linear.weight.grad, plain.linear.weight.grad)  # type: ignore[arg-type]


class Aware(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + (1.0 if torch.compiler.is_compiling() else 0.0)


@pytest.mark.slow
def test_blocks_are_compiled() -> None:
    block = Aware()
    assert block(torch.zeros(2)).tolist() == [0, 0]
    compile_blocks([block])
    assert block(torch.zeros(2)).tolist() == [1, 1]
