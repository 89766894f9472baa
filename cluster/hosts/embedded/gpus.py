"""Which of the machine's GPUs each node of an embedded cluster gets."""

from __future__ import annotations

import os
from collections.abc import Sequence

from cluster.errors import RequestError


def machine_gpus() -> tuple[str, ...]:
    """The GPUs of this machine as CUDA_VISIBLE_DEVICES names them, those alone that it leaves visible."""
    import torch  # seconds; only clusters with GPUs ask

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return tuple(names[:count])


def divide(wanted: Sequence[int], gpus: Sequence[str]) -> list[tuple[str, ...]]:
    """The GPUs of each node, none of them twice.

    Args:
        wanted: how many each node has by the config.
        gpus: those of the machine.

    Raises:
        RequestError: the nodes want more than there are.
    """
    if sum(wanted) > len(gpus):
        raise RequestError(
            f"cluster.nodes: the nodes have {sum(wanted)} GPUs together; this machine has {len(gpus)}"
        )
    ends = [sum(wanted[: index + 1]) for index in range(len(wanted))]
    return [tuple(gpus[end - share : end]) for share, end in zip(wanted, ends, strict=True)]
