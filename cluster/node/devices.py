"""Devices of nodes, for processes that Ray does not start: a placement group holds them.

What Ray could not place it tries again after a second: so it is asked when there is room. And one that is
removed while Ray places it takes what it was about to have with it, for as long as its node lives (so in Ray
2.60; `tests/cluster/node/test_devices.py`): so it is let be placed before it is removed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ray.util import get_placement_group, placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.ray_private import available_resources_by_node

SOON_S = 2.0
_ROOM_LOOK_S = 0.03
_LATER_S = 0.1
"""How often it is looked for room after SOON_S: Ray tells of all nodes each time."""
_LOOK_S = 0.01
_PLACING_S = 1.0
"""What is not placed by then waits for room, and is not about to be placed."""
_FIND_S = 0.02
_NOTHING = 1e-4
"""Ray counts resources in ten-thousandths."""


def reserve(
    name: str,
    bundles: Sequence[Mapping[str, float]],
    nodes: Sequence[str],
    *,
    lifetime: str | None = None,
    seconds: float = SOON_S,
    is_wanted: Callable[[], bool] = lambda: True,
) -> PlacementGroup | None:
    """Ask for devices as soon as they are free, and wait until they are placed, or are not wanted.

    Args:
        name: the placement group's; no other has it.
        nodes: the node ids of the bundles.
        lifetime: Ray's: None, or "detached".
        seconds: for how long it is waited; then they wait in Ray until it places them.

    Returns:
        The group; None where it is not wanted any more, and there is none.
    """
    began = time.monotonic()
    while is_wanted() and not _have_room(bundles, nodes):
        waited = time.monotonic() - began
        if waited > seconds:
            break
        time.sleep(_ROOM_LOOK_S if waited < SOON_S else _LATER_S)
    if not is_wanted():
        return None
    group = placement_group(
        [dict(bundle) for bundle in bundles],
        strategy="PACK",
        name=name,
        lifetime=lifetime,
        bundle_label_selector=[{"ray.io/node-id": node} for node in nodes],
    )
    while not _is_placed(group) and time.monotonic() - began <= seconds and is_wanted():
        time.sleep(_LOOK_S)
    if is_wanted():
        return group
    give_back(group)
    return None


def give_back(group: PlacementGroup) -> None:
    """Remove a placement group, once Ray does not place it at this moment."""
    until = time.monotonic() + _PLACING_S
    while not _is_placed(group) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    remove_placement_group(group)


def _have_room(bundles: Sequence[Mapping[str, float]], nodes: Sequence[str]) -> bool:
    """Whether all bundles have room on their nodes, as far as Ray knows by now."""
    asked: dict[str, Counter[str]] = {node: Counter() for node in nodes}
    for node, bundle in zip(nodes, bundles, strict=True):
        asked[node].update(bundle)
    free = available_resources_by_node()
    return all(
        free.get(node, {}).get(resource, 0.0) + _NOTHING > amount
        for node, resources in asked.items()
        for resource, amount in resources.items()
    )


def _is_placed(group: PlacementGroup) -> bool:
    return placement_group_table(group).get("state") in ("CREATED", "REMOVED")


def find_placed(name: str) -> PlacementGroup | None:
    """The placement group of a name, where it has its devices."""
    try:
        group = get_placement_group(name)
    except ValueError:
        return None
    return group if placement_group_table(group).get("state") == "CREATED" else None


def wait_for_placed(name: str, timeout_s: float) -> PlacementGroup:
    """The placement group of a name, once it has its devices.

    Raises:
        TimeoutError: it has not in time.
    """
    until = time.monotonic() + timeout_s
    while (group := find_placed(name)) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"no devices of {name} within {timeout_s:g} s")
        time.sleep(_FIND_S)
    return group
