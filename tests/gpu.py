"""The marks of tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
