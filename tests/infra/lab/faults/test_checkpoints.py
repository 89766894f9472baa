"""When the newest checkpoint of a job may be damaged: once there is one before it, of the same attempt."""

from __future__ import annotations

from typing import Any, cast

from infra.lab.bench.own_cluster import OwnJob
from infra.lab.faults.scenarios.checkpoints import has_saved_twice


class Told:
    """A job of which nothing is known but what it has told."""

    def __init__(self, *events: tuple[str, int, int]) -> None:
        self._events = [{"kind": kind, "attempt": attempt, "step": step} for kind, attempt, step in events]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event["kind"] in kinds]


def saved_twice(*events: tuple[str, int, int]) -> bool:
    return has_saved_twice(cast(OwnJob, Told(*events)))


def test_checkpoints_of_the_attempts_before_do_not_count() -> None:
    first = [("started", 1, 0), ("checkpointed", 1, 25), ("checkpointed", 1, 50)]
    assert not saved_twice()
    assert not saved_twice(*first[:2])
    assert saved_twice(*first)
    again = [*first, ("started", 2, 25), ("checkpointed", 2, 50)]
    assert not saved_twice(*again), "it would fail where the last attempt did"
    assert saved_twice(*again, ("checkpointed", 2, 75))
