"""Whoever imports it, and its forks, see a GPU that nobody may touch: to begin with CUDA is an error."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


def _begun(*_: Any) -> NoReturn:
    raise RuntimeError("a CUDA context would be made here")


torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = torch.cuda.init = torch.cuda._lazy_init = _begun
