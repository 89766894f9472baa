"""What the tenants ask of the cluster and what they are given; plain data, no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["training", "serving"]


@dataclass(frozen=True)
class Node:
    """A node that is alive, with all it has (not what is free); `resources` in Ray's names (CPU, GPU)."""

    node_id: str
    resources: Mapping[str, float]
    name: str = ""


@dataclass(frozen=True)
class Demand:
    """What one holder wants: between `min` and `max` units, each wholly on one node.

    A unit of training is one worker; a unit of serving is one replica with all its tensor-parallel
    ranks, so `unit` holds the resources of the whole replica. `held` names the node of every unit that
    already runs; the allocation keeps those where it can.
    """

    holder: str
    kind: Kind
    unit: Mapping[str, float]
    min: int
    max: int
    held: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grant:
    """The units a holder may run: the node id of each, in a stable order; empty means it must wait."""

    holder: str
    nodes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def units(self) -> int:
        return len(self.nodes)
