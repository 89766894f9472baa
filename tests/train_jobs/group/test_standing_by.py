"""Workers without devices: which of them the next group gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from train_jobs.group.standing_by import StandingBy


class Waiting:
    """A group that stands by."""

    def __init__(self, *nodes: str) -> None:
        self.spec: Any = SimpleNamespace(nodes=nodes)
        self.killed = False

    def kill(self) -> None:
        self.killed = True


def standing(*groups: Waiting) -> StandingBy:
    found = StandingBy()
    for group in groups:
        found.add(cast(Any, group))
    return found


def test_the_next_group_gets_workers_on_its_own_nodes() -> None:
    one, both, twice = Waiting("a"), Waiting("a", "b"), Waiting("a")
    groups = standing(both, one, twice)
    assert groups.take(("a",)) is one  # type: ignore[comparison-overlap]
    assert groups.take(("a",)) is twice  # type: ignore[comparison-overlap]
    assert groups.take(("a",)) is both, "what has begun there saves something still"  # type: ignore[comparison-overlap]
    assert groups.take(("a",)) is None
    assert groups.nodes == set()


def test_nobody_gets_those_of_other_nodes() -> None:
    groups = standing(Waiting("a", "b"))
    assert groups.take(("b", "a")) is None
    assert groups.nodes == {"a", "b"}


def test_those_on_nodes_that_are_gone_end() -> None:
    there, half = Waiting("a"), Waiting("a", "b")
    groups = standing(there, half)
    groups.only({"a"})
    assert (there.killed, half.killed) == (False, True)
    groups.only(())
    assert there.killed
    assert groups.nodes == set()
