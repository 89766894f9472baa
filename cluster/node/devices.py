"""Devices of nodes, for processes that Ray does not start: a placement group holds them.

Ray knows a tenth of a second later that something has become free, and what it could not place it tries again
after a second: so it is asked anew until it places them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ray.util import get_placement_group, placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

PLACED_S = 0.03
"""Within so long Ray places what has room."""
SOON_S = 2.0
LATER_S = 0.25
"""How often it is asked anew when it is not placed by then."""
_LOOK_S = 0.005
_FIND_S = 0.02


def reserve(
    name: str,
    bundles: Sequence[Mapping[str, float]],
    nodes: Sequence[str],
    *,
    lifetime: str | None = None,
    seconds: float = SOON_S,
    is_wanted: Callable[[], bool] = lambda: True,
) -> PlacementGroup | None:
    """Ask for devices until they are placed, which may have become free a moment ago, or are not wanted.

    Args:
        name: the placement group's; no other has it.
        nodes: the node ids of the bundles.
        lifetime: Ray's: None, or "detached".
        seconds: for how long it is asked anew; then they wait until Ray places them.

    Returns:
        The group; None where it is not wanted any more, and there is none.
    """
    began = time.monotonic()
    while True:
        group = placement_group(
            [dict(bundle) for bundle in bundles],
            strategy="PACK",
            name=name,
            lifetime=lifetime,
            bundle_label_selector=[{"ray.io/node-id": node} for node in nodes],
        )
        waited = time.monotonic() - began
        placed = _is_placed(group, PLACED_S if waited < SOON_S else LATER_S, is_wanted)
        if is_wanted() and (placed or waited > seconds):
            return group
        remove_placement_group(group)
        if not is_wanted():
            return None


def _is_placed(group: PlacementGroup, seconds: float, is_wanted: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while placement_group_table(group).get("state") != "CREATED":
        if time.monotonic() > until or not is_wanted():
            return False
        time.sleep(_LOOK_S)
    return True


def find_placed(name: str) -> PlacementGroup | None:
    """The placement group of a name, where it has its devices; it may be made anew until then."""
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
