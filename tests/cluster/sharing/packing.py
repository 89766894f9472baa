"""Whether pieces fit into rooms, by trying everything."""

from __future__ import annotations

from functools import cache


@cache
def packs(sizes: tuple[int, ...], room: tuple[int, ...]) -> bool:
    """Whether pieces of these sizes fit into these rooms, by trying everything; both in falling order."""
    if not sizes:
        return True
    return any(
        packs(sizes[1:], tuple(sorted((*room[:at], left - sizes[0], *room[at + 1 :]), reverse=True)))
        for at, left in enumerate(room)
        if left >= sizes[0] and left not in room[:at]
    )
