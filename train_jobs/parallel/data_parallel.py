"""torch.nn.DataParallel: one process drives all its GPUs, one thread each; the baseline that DDP replaces.

The model is copied to every GPU in each forward, inputs are scattered, outputs gathered on the first GPU:
its memory and Python's lock are the limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cluster.config.sections.train import TrainJobConfig
from train_jobs.parallel.mesh import Mesh
from train_jobs.parallel.model import ParallelModel, autocast_dtype


def parallelize(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, config: TrainJobConfig
) -> ParallelModel:
    """The model on all GPUs of this process; on the first, or on the CPU, where there are fewer than two."""
    dtype = autocast_dtype(config)
    model.to(mesh.device)
    gpus = torch.cuda.device_count() if mesh.device.type == "cuda" else 0
    if gpus < 2:
        parallel = ParallelModel(model, mesh, dtype)
        where = "one GPU" if gpus else "no GPU"
        parallel.notes.append(
            f"data_parallel: this process has {where}; the model runs on {mesh.device} as in a plain process"
        )
        return parallel
    # Autocast is a state of the thread, and each GPU has its own.
    replicated = nn.DataParallel(model if dtype is None else _Autocast(model, dtype))
    parallel = ParallelModel(replicated, mesh)
    parallel.stepped = model
    return parallel


class _Autocast(nn.Module):
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype=self.dtype):
            return self.model(*args, **kwargs)
