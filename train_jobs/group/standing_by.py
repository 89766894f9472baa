"""With what a job's groups start sooner: others without devices, whose workers wait, and a lighthouse."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from train_jobs.group.group import Group


class StandingBy:
    """Of one job, on any of its nodes."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self.lighthouses: dict[int, Any] = {}
        """By attempt: handles of those that do not know yet whom to wait for."""

    def add(self, group: Group) -> None:
        self._groups.append(group)

    def take(self, nodes: tuple[str, ...]) -> Group | None:
        """One whose workers are on these nodes, else one that has begun on the first of them; None: there is
        none."""
        for group in sorted(self._groups, key=lambda each: each.spec.nodes != nodes):
            if group.spec.nodes[0] == nodes[0]:
                self._groups.remove(group)
                return group
        return None

    @property
    def nodes(self) -> frozenset[str]:
        """The ids of the nodes where any are."""
        return frozenset(node for group in self._groups for node in group.spec.nodes)

    def only(self, nodes: Collection[str]) -> None:
        """End those that have a worker on another node."""
        for group in [each for each in self._groups if not set(nodes) >= set(each.spec.nodes)]:
            self._groups.remove(group)
            group.kill()
