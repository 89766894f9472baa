"""The devices that a replica's engine has been given: waited for, and which they are."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from ray.util import get_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_apps.engine.devices import VISIBLE

LOOK_EVERY_S = 0.02
_NAMED_S = 10.0
"""How long a placement group may take to be found by its name."""
_PLACED_S = 1.0
"""How long a thread waits for them at a time: who does not want them any more has it back then."""


async def take_devices(group: str, gpus: float) -> dict[str, str]:
    """Wait until a placement group has its devices; the variables that show them to an engine.

    Args:
        group: its name.
        gpus: that it has.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + _NAMED_S
    while True:
        try:
            found = await asyncio.to_thread(get_placement_group, group)
            break
        except ValueError:
            if loop.time() > until:
                raise
            await asyncio.sleep(LOOK_EVERY_S)
    while not await asyncio.to_thread(found.wait, _PLACED_S):
        pass
    return await _visible(found, gpus) if gpus else {}


async def _visible(group: PlacementGroup, gpus: float) -> dict[str, str]:
    """Ask a task on the devices which they are: the same as everybody's after it in the group."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    look: Any = ray.remote(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy)(_seen)
    seen: dict[str, str] = await look.remote()
    return seen


def _seen() -> dict[str, str]:
    return {name: os.environ[name] for name in VISIBLE if name in os.environ}
