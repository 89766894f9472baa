"""What a task's sums become, wherever their parts lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from train_jobs.tasks import Sums

ON_ANOTHER = torch.tensor(6)
"""As of `torch.tensor(len(labels))` beside a loss on a GPU."""


@pytest.mark.parametrize("count", [ON_ANOTHER, 6, 6.0])
@pytest.mark.parametrize("right", [torch.tensor(True), 1])
def test_numbers_and_tensors_of_any_type_are_summed(count: Tensor | float, right: Tensor | float) -> None:
    loss = torch.tensor(3.0, dtype=torch.bfloat16, requires_grad=True)
    vector = Sums(loss, count, {"right": right}).vector()
    assert vector.tolist() == [3.0, 6.0, 1.0]
    assert (vector.dtype, vector.requires_grad) == (torch.float64, False)


# A device that refuses what another one holds, as CUDA does.
@pytest.mark.parametrize("count", [ON_ANOTHER, 6])
def test_they_come_to_where_the_loss_is(count: Tensor | float) -> None:
    loss = torch.zeros((), device="meta")
    assert Sums(loss, count, {"right": ON_ANOTHER}).vector().device == loss.device
