"""Which parked engines end, so that those of a node keep within its memory for them; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

ParkedKey = tuple[str, str, str]
"""An app, a Serve application of it, and a replica of that."""


@dataclass(frozen=True)
class Parked:
    """An engine that is parked.

    Attributes:
        is_wanted: it has what its app serves, and may be woken.
        node: the id of its node.
        since: when it was parked, ISO 8601 in UTC.
        bytes: memory that it takes.
        most_bytes: what all of its node may take.
    """

    key: ParkedKey
    is_wanted: bool
    node: str
    revision: int
    since: str
    bytes: int
    most_bytes: int


def too_many(parked: Iterable[Parked]) -> list[ParkedKey]:
    """Those that end: who is not wanted, and the oldest of each node until the rest fit."""
    there = list(parked)
    ends = [each.key for each in there if not each.is_wanted]
    wanted = sorted((each for each in there if each.is_wanted), key=lambda each: each.node)
    for _, on_node in groupby(wanted, key=lambda each: each.node):
        rest = sorted(on_node, key=lambda each: each.since)
        while rest and sum(each.bytes for each in rest) > min(each.most_bytes for each in rest):
            ends.append(rest.pop(0).key)
    return ends
