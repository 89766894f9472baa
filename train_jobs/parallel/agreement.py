"""What one rank finds out, or fails at, told to all: none of them is left waiting for one that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from cluster.errors import ShoalError

T = TypeVar("T")


def from_rank_0(find: Callable[[], T], group: dist.ProcessGroup) -> T:
    """What rank 0 finds, on all ranks, which call this together.

    Args:
        group: of all ranks; it has to wait for as long as rank 0 may take.

    Raises:
        ShoalError: what rank 0 failed with, on all ranks.
    """
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = find()
        except ShoalError as error:
            found[1] = error
    dist.broadcast_object_list(found, group=group)
    if found[1] is not None:
        raise found[1]
    result: T = found[0]
    return result


def from_all(find: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """What each rank finds, in their order; all ranks call this together.

    Args:
        group: of all ranks; it has to wait for as long as the slowest may take.

    Raises:
        ShoalError: what the first of those that failed did so with, on all ranks.
    """
    mine: tuple[T | None, ShoalError | None]
    try:
        mine = find(), None
    except ShoalError as error:
        mine = None, error
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=group)
    problem = next((failed for _, failed in found if failed is not None), None)
    if problem is not None:
        raise problem
    return [value for value, _ in found]
