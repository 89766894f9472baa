"""What the tenants ask of the cluster and what they are given; plain data, no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["training", "serving"]


@dataclass(frozen=True)
class Node:
    """A node that is alive, with all that may be granted of it (not what is free).

    Attributes:
        resources: in Ray's names (CPU, GPU); what strangers use is not in it.
        accelerator: kind of its accelerators, for example "H100-SXM"; None where it has none or none is said.
        avoided: it fails jobs: nothing new is granted there, but for minimums that have no other place.
        kind: of the config's kinds of nodes, where whoever made it says so.
    """

    node_id: str
    resources: Mapping[str, float]
    name: str = ""
    accelerator: str | None = None
    avoided: bool = False
    kind: str | None = None


@dataclass(frozen=True)
class Demand:
    """What one holder wants: between `min` and `max` units, each wholly on one node.

    A unit of training is the workers of one tensor-parallel group; a unit of serving is one replica with all
    its tensor-parallel ranks.

    Attributes:
        unit: what one unit takes, in Ray's names.
        held: the node of every unit that runs or is being started, gang after gang; the allocation keeps
            those where it can.
        gang: how many units come and go together (a replica group of training); `min` and `max` are
            multiples of it.
        priority: among the holders of one tenant, the greater goes first.
        weight: among holders of one priority, the share of what is contended for: 2 is due twice as much.
        accelerator: the only kind of node that will do; None for any.
        apart: no two units on one node.
        starting: those of `held` that do not run yet: a holder is not left with such units only.
        rebuilds: all units are one group, which stops and is built anew whenever they change; of others those
            that stay go on meanwhile, and give a newcomer its state.

    Raises:
        ValueError: the numbers do not agree with one another.
    """

    holder: str
    kind: Kind
    unit: Mapping[str, float]
    min: int
    max: int
    held: tuple[str, ...] = ()
    gang: int = 1
    priority: int = 0
    weight: float = 1.0
    accelerator: str | None = None
    apart: bool = False
    starting: tuple[str, ...] = ()
    rebuilds: bool = False

    def __post_init__(self) -> None:
        if self.gang < 1 or any(units % self.gang for units in (self.min, self.max, len(self.held))):
            raise ValueError(
                f"{self.holder}: min {self.min}, max {self.max} and the {len(self.held)} units held are no"
                f" multiples of a gang of {self.gang}"
            )
        if self.weight <= 0:
            raise ValueError(f"{self.holder}: a weight of {self.weight}")

    @property
    def most(self) -> int:
        """Units it takes when there are enough."""
        return max(self.min, self.max)


Tier = tuple[bool, int]


def tier_of(demand: Demand, priority: Kind) -> Tier:
    """What goes before what: all of the tenant that has priority, then by the holders' own; least first."""
    return demand.kind != priority, -demand.priority


def place_in_queue(
    demand: Demand, priority: Kind, since: Mapping[str, float]
) -> tuple[Tier, bool, float, str]:
    """The order in which minimums are met, least first: the tier, who holds units, who asked first.

    Args:
        priority: the tenant that goes first.
        since: when each holder began to ask.
    """
    return tier_of(demand, priority), not demand.held, since.get(demand.holder, 0.0), demand.holder


@dataclass(frozen=True)
class Grant:
    """The units a holder may run: the node id of each, gang after gang; empty means it must wait.

    Attributes:
        coming: node ids of the units that are kept for it and occupied until others have left.
        gave_way_to: the holders for whose sake units left this grant in this decision, or moved within it.
    """

    holder: str
    nodes: tuple[str, ...] = field(default_factory=tuple)
    coming: tuple[str, ...] = ()
    gave_way_to: tuple[str, ...] = ()

    @property
    def units(self) -> int:
        return len(self.nodes)
