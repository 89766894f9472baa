"""What is taken of torch.distributed that is not public, all of it here.

A group's timeout can only be given when it is made; torchtitan changes it after the first step in the same
way (torchtitan/distributed/utils.py, `set_pg_timeouts`).
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """How long collectives of a group may take from now on."""
    distributed_c10d._set_pg_timeout(timeout, group)


def collectives_begun(group: dist.ProcessGroup, device: torch.device) -> int:
    """How many collectives on tensors of a device this process has begun in a group: told to, on a GPU."""
    backend = group._get_backend(device)
    return int(backend._get_sequence_number_for_group())  # type: ignore[attr-defined]


def groups_of_process() -> set[dist.ProcessGroup]:
    """Every group that this process is in, whoever has made it."""
    return set(distributed_c10d._world.pg_map)
