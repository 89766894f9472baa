"""The devices that a replica's engine has been given: waited for, and which they are."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.node.devices import find_placed
from serve_apps.engine.devices import VISIBLE

LOOK_EVERY_S = 0.02


async def take_devices(group: str, gpus: float) -> dict[str, str]:
    """Wait until a placement group has its devices; the variables that show them to an engine.

    Args:
        group: its name. It may not be there yet, and be made anew until it is placed.
        gpus: that it has.
    """
    while (placed := await asyncio.to_thread(find_placed, group)) is None:
        await asyncio.sleep(LOOK_EVERY_S)
    return await _visible(placed, gpus) if gpus else {}


async def _visible(group: PlacementGroup, gpus: float) -> dict[str, str]:
    """Ask a task on the devices which they are: the same as everybody's after it in the group."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    look: Any = ray.remote(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy)(_seen)
    seen: dict[str, str] = await look.remote()
    return seen


def _seen() -> dict[str, str]:
    return {name: os.environ[name] for name in VISIBLE if name in os.environ}
