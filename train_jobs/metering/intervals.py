"""Arithmetic on intervals of time: how much of one kind is not covered by another. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""Start and end; the end is not before the start."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def uncovered(wanted: Iterable[Interval], cover: Iterable[Interval]) -> float:
    """The length of the times in `wanted` that are not in `cover`."""
    left, covers = 0.0, union(cover)
    first = 0
    for start, end in union(wanted):
        while first < len(covers) and covers[first][1] <= start:
            first += 1
        left += end - start
        index = first
        while index < len(covers) and covers[index][0] < end:
            left -= min(end, covers[index][1]) - max(start, covers[index][0])
            index += 1
    return left
