"""The devices of engines: a placement group for each, which the controller makes from what is granted.

It holds devices whoever lives: the controller that comes back finds it by its name, and removes what belongs
to no engine any more.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from ray.util import get_placement_group, placement_group_table

from cluster.node import devices

_NAME = "shoal-engine:"


@dataclass(frozen=True)
class EngineDevices:
    """What one engine has, or waits for.

    Attributes:
        name: of the placement group; no other has it, not even one that was before.
        node: the id of the node; None while Ray has not placed it.
    """

    name: str
    application: str
    replica: str
    node: str | None


def new_name(application: str, replica: str) -> str:
    """Of a placement group for an engine of a replica."""
    return f"{_NAME}{application}#{replica}#{uuid.uuid4().hex[:8]}"


def look() -> list[EngineDevices]:
    """The devices of all engines of this cluster."""
    found = []
    for group in placement_group_table().values():
        name = str(group.get("name", ""))
        parts = name.removeprefix(_NAME).split("#")
        if name.startswith(_NAME) and len(parts) == 3 and group.get("state") != "REMOVED":
            nodes = group.get("bundles_to_node_id") or {}
            node = next(iter(nodes.values()), "") if group.get("state") == "CREATED" else ""
            found.append(EngineDevices(name, parts[0], parts[1], node or None))
    return found


def reserve(name: str, node: str, resources: Mapping[str, float]) -> None:
    """Ask for the devices of an engine on a node; they may have become free a moment ago."""
    devices.reserve(name, [resources], [node], lifetime="detached")


def free(name: str) -> None:
    """Give the devices of an engine back, or up; nothing happens where there are none of this name."""
    try:
        group = get_placement_group(name)
    except ValueError:
        return
    devices.give_back(group)
