"""Which devices of which nodes are taken: the simulation's own books, apart from what was allocated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.sharing.demand import Node

DEVICE = "GPU"
"""The resource, in Ray's name, that the simulation counts."""


class Occupancy:
    """Free devices by node; whoever takes more than there is has been granted what another holds."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.size = {node.node_id: int(node.resources[DEVICE]) for node in nodes}
        self.left = dict(self.size)
        self.dead: set[str] = set()
        self.total = sum(self.size.values())
        self.free = self.total
        """Devices of living nodes that nobody has."""
        self.down = 0
        """Devices of dead nodes."""

    def take(self, places: Iterable[str], devices: int) -> None:
        """Take so many devices at each of these places (a node that is there twice gives twice).

        Raises:
            RuntimeError: they are taken already, or the node is dead: the books do not balance.
        """
        for node in places:
            if self.left[node] < devices or node in self.dead:
                raise RuntimeError(f"{devices} devices of {node} were granted, {self.left[node]} are free")
            self.left[node] -= devices
            self.free -= devices

    def give(self, places: Iterable[str], devices: int) -> None:
        """Give devices back; those of a dead node stay down with it."""
        for node in places:
            self.left[node] += devices
            if self.left[node] > self.size[node]:
                raise RuntimeError(f"{node} has {self.size[node]} devices, {self.left[node]} were given back")
            if node in self.dead:
                self.down += devices
            else:
                self.free += devices

    def die(self, node: str) -> None:
        """The node is gone, with what is free of it; what is taken follows when it is given back."""
        self.dead.add(node)
        self.free -= self.left[node]
        self.down += self.left[node]

    def come_back(self, node: str) -> None:
        """The node is there again, with nothing on it."""
        self.dead.discard(node)
        self.free += self.left[node]
        self.down -= self.left[node]

    def alive(self) -> tuple[Node, ...]:
        """The living nodes."""
        if not self.dead:
            return self.nodes
        return tuple(node for node in self.nodes if node.node_id not in self.dead)


def cluster_of(kinds: Sequence[tuple[str | None, int]], node_devices: int) -> list[Node]:
    """Nodes of `node_devices` devices for each (kind of accelerator, devices); the last may be smaller."""
    nodes: list[Node] = []
    for kind, devices in kinds:
        while devices > 0:
            size = min(devices, node_devices)
            name = f"node-{len(nodes) + 1:05d}"
            nodes.append(Node(name, {DEVICE: float(size)}, name=name, accelerator=kind))
            devices -= size
    return nodes
