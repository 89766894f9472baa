"""Which groups a grant has no place for, and where it has place for more. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

Gang = tuple[str, ...]
"""The node of every unit of one group, in no order that matters."""


def gangs_of(nodes: Sequence[str], units: int) -> list[Gang]:
    """The groups of a grant, whose units stand side by side."""
    return [tuple(sorted(nodes[first : first + units])) for first in range(0, len(nodes), units)]


def compare(granted: Sequence[Gang], running: Mapping[str, Gang]) -> tuple[list[str], list[Gang]]:
    """The groups that have to leave, and the gangs that are to be started.

    Args:
        running: groups by name, the oldest first; of those in the same place the newest leaves, which has
            done least.
    """
    free = Counter(tuple(sorted(gang)) for gang in granted)
    leaving = []
    for name, gang in running.items():
        place = tuple(sorted(gang))
        if free[place]:
            free[place] -= 1
        else:
            leaving.append(name)
    return leaving, [gang for gang, count in free.items() for _ in range(count)]
