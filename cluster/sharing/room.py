"""What is left on each node, in whole steps of every resource; any change can be taken back."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from cluster.sharing.demand import Demand, Node

STEPS = 10_000
"""Resources are counted in whole ten-thousandths, as Ray does, so that sums are exact."""

Vector = tuple[int, ...]
"""An amount of every kind of resource, in steps."""

_KIND_OF_NODE = "accelerator:"
_PLENTY = 10**9
"""How often a node of a kind may be named by units that ask for this kind."""


class Scale:
    """Which resources are counted, in which order; turns amounts into vectors."""

    def __init__(self, demands: Iterable[Demand]) -> None:
        demands = list(demands)
        named = {name for demand in demands for name, amount in demand.unit.items() if amount > 0}
        self.names = sorted(named | {"GPU"})
        self._nodes: dict[tuple[object, ...], Vector] = {}
        self.accelerators = sorted({demand.accelerator for demand in demands} - {None})  # type: ignore[type-var]
        self.apart = sorted(demand.holder for demand in demands if demand.apart)

    @property
    def uncounted(self) -> int:
        """How many kinds of a vector are no amounts: they stand behind the others."""
        return len(self.accelerators) + len(self.apart)

    def unit(self, demand: Demand) -> Vector:
        """What a unit takes, rounded up.

        The kind of its node is a resource of which it takes one step; of whoever wants its units apart each
        node has one step.
        """
        amounts = tuple(-int(-steps // 1) for steps in self._steps(demand.unit))
        kinds = tuple(int(demand.accelerator == kind) for kind in self.accelerators)
        return amounts + kinds + tuple(int(demand.apart and demand.holder == each) for each in self.apart)

    def node(self, node: Node) -> Vector:
        """What a node has, rounded down."""
        # A cluster has few shapes of nodes.
        shape = (node.accelerator, *(node.resources.get(name, 0.0) for name in self.names))
        if shape not in self._nodes:
            amounts = tuple(int(steps // 1) for steps in self._steps(node.resources))
            kinds = tuple(_PLENTY * (node.accelerator == kind) for kind in self.accelerators)
            self._nodes[shape] = amounts + kinds + (1,) * len(self.apart)
        return self._nodes[shape]

    def _steps(self, amounts: Mapping[str, float]) -> Iterable[float]:
        # Rounding takes away the noise of binary fractions (0.1 * 3) before steps are cut to whole ones.
        return (round(amounts.get(name, 0.0) * STEPS, 3) for name in self.names)


class Room:
    """What is left on each node, now (`free`) and once all that must give way has gone (`future`).

    A unit is granted only where it fits in both: in `free` because running units are still there, in
    `future` because places are kept for those who wait. Nodes are named by their index in `ids`.

    Nodes of which the same is left are interchangeable, so a search looks at the distinct amounts and not
    at the nodes: it costs O(distinct amounts), of which a large cluster has few.
    """

    def __init__(self, nodes: Sequence[Node], scale: Scale) -> None:
        # By name, so that equally good nodes fill in an order that people expect. What is avoided comes last:
        # a search that takes the first of its kind need not pass over it.
        ordered = sorted(nodes, key=lambda node: (node.avoided, node.name, node.node_id))
        self.ids = [node.node_id for node in ordered]
        self.index = {node_id: index for index, node_id in enumerate(self.ids)}
        self.total = [scale.node(node) for node in ordered]
        self.free = list(self.total)
        self.future = list(self.total)
        self.closed: set[int] = set()
        """Nodes that take no further minimum, because they are being emptied for one that waits."""
        self.avoided = frozenset(index for index, node in enumerate(ordered) if node.avoided)
        """Nodes that take nothing new, unless `last_resort`."""
        self.last_resort = False
        self.loosened: set[int] = set()
        """Nodes on which units are, or were, about to leave: only there `future` may exceed `free`."""
        self.version = 0
        """Of each state another; a rollback brings the former one back."""
        self._versions = itertools.count(1)
        counted = len(scale.names)
        self.sums = tuple(map(sum, zip(*self.total, strict=True)))[:counted] if ordered else ()
        most = [max((total[kind] for total in self.total), default=0) for kind in range(counted)]
        # What is no amount makes a node neither full nor empty.
        self._weights = [1.0 / amount if amount else 0.0 for amount in most] + [0.0] * scale.uncounted
        self.now = list(self.total)
        """What can be granted at once: what is left both in `free` and in `future`."""
        self._nodes_with: dict[Vector, list[int]] = {}
        for index, now in enumerate(self.now):
            self._nodes_with.setdefault(now, []).append(index)
        self._known: dict[Vector, dict[Vector, tuple[int, float]]] = {}
        self._undo: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def dominant_share(self, unit: Vector) -> float:
        """The greatest share of the cluster that one unit takes of any resource.

        Ghodsi et al., Dominant Resource Fairness, NSDI 2011, section 4.
        """
        return max((need / have for need, have in zip(unit, self.sums, strict=False) if have), default=0.0)

    # -- changes ------------------------------------------------------------------------------------------

    def take(self, index: int, unit: Vector) -> None:
        """Grant a unit, or let one that runs stay."""
        self._change(index, minus(self.free[index], unit), minus(self.future[index], unit))

    def give(self, index: int, unit: Vector) -> None:
        """Undo `take` for a unit that nobody has started."""
        self._change(index, plus(self.free[index], unit), plus(self.future[index], unit))

    def leave(self, index: int, unit: Vector) -> None:
        """A running unit will go: its place can be kept for another, not yet granted."""
        self.loosened.add(index)
        self._change(index, self.free[index], plus(self.future[index], unit))

    def reserve(self, index: int, unit: Vector) -> None:
        """Keep a place that is free once others have left."""
        self._change(index, self.free[index], minus(self.future[index], unit))

    def note(self, undo: Callable[..., object], *arguments: object) -> None:
        """Have something of the caller's undone by `rollback`, too."""
        self._undo.append((undo, arguments))

    def mark(self) -> tuple[int, int]:
        """A moment to which `rollback` can return."""
        return len(self._undo), self.version

    def rollback(self, mark: tuple[int, int]) -> None:
        """Undo all changes since a mark, the last first."""
        length, version = mark
        while len(self._undo) > length:
            undo, arguments = self._undo.pop()
            undo(*arguments)
        self.version = version

    def _change(self, index: int, free: Vector, future: Vector) -> None:
        self._undo.append((self._restore, (index, self.free[index], self.future[index])))
        self._restore(index, free, future)

    def _restore(self, index: int, free: Vector, future: Vector) -> None:
        self.free[index], self.future[index] = free, future
        self.version = next(self._versions)
        now = free if free == future else tuple(map(min, free, future))
        if now != self.now[index]:
            self.now[index] = now
            heapq.heappush(self._nodes_with.setdefault(now, []), index)

    # -- places -------------------------------------------------------------------------------------------

    def shut(self, *, minimum: bool) -> Set[int]:
        """The nodes on which nothing may be placed now."""
        closed: Set[int] = self.closed if minimum else frozenset()
        return closed if self.last_resort or not self.avoided else closed | self.avoided

    def best(self, unit: Vector, count: int, *, minimum: bool = False) -> tuple[int, int] | None:
        """The node for as many of `count` units as fit on one now: (index, units); None where none fits.

        One that takes all of them and is fullest then, else the one that takes most.
        """
        known, shut = self._known.setdefault(unit, {}), self.shut(minimum=minimum)
        found: tuple[int, float, int] | None = None
        for now in list(self._nodes_with):
            fact = known.get(now)
            if fact is None:
                fact = known[now] = (times(now, unit), self.emptiness(now))
            units, empty = fact
            if units == 0:
                continue
            units = min(units, count)
            if found is not None and (-units, empty) > found[:2]:
                continue
            index = self._first_with(now, skip=shut)
            if index is not None and (found is None or (-units, empty, index) < found):
                found = (-units, empty, index)
        return None if found is None else (found[2], -found[0])

    def emptiness(self, amounts: Vector) -> float:
        """How much these amounts are, as a sum of shares of the largest node: less is a better fit."""
        return sum(have * weight for have, weight in zip(amounts, self._weights, strict=True))

    def _first_with(self, now: Vector, skip: Set[int]) -> int | None:
        heap = self._nodes_with[now]
        while heap and self.now[heap[0]] != now:
            heapq.heappop(heap)
        if not heap:
            del self._nodes_with[now]
            return None
        if heap[0] not in skip:
            return heap[0]
        return min((index for index in heap if self.now[index] == now and index not in skip), default=None)


def fits(unit: Vector, room: Vector) -> bool:
    """Whether a unit fits; what it does not take may be overdrawn."""
    return all(need <= have or need == 0 for need, have in zip(unit, room, strict=True))


def plus(left: Vector, right: Vector) -> Vector:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def minus(left: Vector, right: Vector) -> Vector:
    return tuple(a - b for a, b in zip(left, right, strict=True))


def scaled(unit: Vector, count: int) -> Vector:
    return tuple(amount * count for amount in unit)


def times(room: Vector, unit: Vector) -> int:
    """How many such units fit."""
    return max(0, min((have // need for have, need in zip(room, unit, strict=True) if need), default=_PLENTY))
