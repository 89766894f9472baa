"""Where a job's data is prepared: here, or on its workers; what a grant, a node or a stop changes of that."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError, ShoalError
from cluster.files.storage import Storage
from cluster.sharing.demand import Grant
from tests.train_jobs.ranks import tiny_job
from train_jobs.data.tokenizing import LongWorkError
from train_jobs.driver import job_data
from train_jobs.driver.data_errors import NotThereError, StoppedError
from train_jobs.driver.job_data import JobData
from train_jobs.driver.job_lease import JobLease

DONE, STOPPED = object(), object()
"""Ends of a process that prepares; STOPPED: whoever asked for it wants it to end."""
End = object | ShoalError


class Story:
    """Driver, lease and processes at once: what is granted when, and how each process ends.

    Args:
        grants: nodes granted, one for each time that the broker is asked; the last for ever.
        ends: how each process ends, in their order.
    """

    def __init__(self, grants: Sequence[tuple[str, ...]], ends: Sequence[End], workers: int = 2) -> None:
        number = {"min": workers, "max": workers}
        self.config: TrainJobConfig = tiny_job(Path("c.parquet"), workers=number)
        self.grants, self.ends = list(grants), list(ends)
        self.alive = {"a", "b", "c"}
        self.stopping = False
        self.released = 0
        self.held: list[tuple[str, ...]] = []
        self.ran: list[tuple[str, ...] | str] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.least, self.unit_size = 2, 1

    # the driver

    def tell(self, kind: str, **facts: Any) -> None:
        self.told.append((kind, facts))

    def is_stopping(self) -> bool:
        return self.stopping

    def wait_for_lease(self) -> Grant:
        while len(self.grants[0]) < self.least:
            self.grants.pop(0)
        return self.grant()

    # the lease

    def grant(self) -> Grant:
        nodes = self.grants.pop(0) if len(self.grants) > 1 else self.grants[0]
        return Grant("job/lm", nodes)

    def renew(self, held: Sequence[str], starting: Sequence[str]) -> Grant | None:
        self.held.append(tuple(held))
        return self.grant()

    def release(self) -> None:
        self.released += 1

    def alive_of(self, nodes: Sequence[str]) -> set[str]:
        return self.alive & set(nodes)

    # the processes

    def apart(
        self,
        config: TrainJobConfig,
        place: Storage,
        stop: Callable[[], bool],
        tell: Callable[[str], None],
        nodes: Sequence[str] | None,
        *,
        hand_over: bool,
        notes: Storage | None,
    ) -> bool:
        self.ran.append("handing over" if hand_over else "here" if nodes is None else tuple(nodes))
        end = self.ends.pop(0)
        for _ in range(50):
            if stop():
                assert end is STOPPED
                raise StoppedError("stopped")
            if end is not STOPPED:
                break
        assert end is not STOPPED, "nobody stopped it"
        if isinstance(end, ShoalError):
            raise end
        return True


def prepare(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_data, "prepare_apart", story.apart)
    monkeypatch.setattr(job_data, "RENEW_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert JobData(story, cast("JobLease", story), Storage("data")).prepare()
    assert story.ends == []


def test_short_work_is_done_here_and_no_worker_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story([()], [DONE])
    prepare(story, monkeypatch)
    assert (story.ran, story.held, story.released) == (["handing over"], [], 0)


def test_workers_that_have_fewer_cpus_than_are_here_are_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story([()], [DONE], workers=1)
    prepare(story, monkeypatch)
    assert story.ran == ["here"]


def test_long_work_goes_to_workers_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story([("a", "b")], [LongWorkError(600), DONE])
    prepare(story, monkeypatch)
    assert story.ran == ["handing over", ("a", "b")]
    assert story.released == 0, "it trains there next"
    assert [facts.get("workers") for kind, facts in story.told if kind == "preparing"] == [2]


def test_long_work_goes_on_here_until_there_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story([(), ("a",), ("a",), ("a", "b")], [LongWorkError(600), STOPPED, DONE])
    prepare(story, monkeypatch)
    assert story.ran == ["handing over", "here", ("a", "b")]


def test_what_is_done_before_there_are_workers_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story([(), ()], [LongWorkError(600), DONE])
    prepare(story, monkeypatch)
    assert story.ran == ["handing over", "here"]


def test_another_grant_moves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    both, other = ("a", "b"), ("b", "c")
    story = Story([both, both, both, other], [LongWorkError(600), STOPPED, DONE])
    prepare(story, monkeypatch)
    assert story.ran == ["handing over", both, other]


def test_a_lost_grant_brings_it_back_here(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("a", "b")
    story = Story([both, both, both, (), (), both], [LongWorkError(600), STOPPED, STOPPED, DONE])
    prepare(story, monkeypatch)
    assert story.ran == ["handing over", both, "here", both]


def test_a_lost_node_is_no_mistake_and_anything_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ShoalError("ActorDiedError")
    story = Story([("a", "b")], [LongWorkError(600), lost, DONE])
    story.alive = {"a"}
    prepare(story, monkeypatch)
    assert story.ran == ["handing over", ("a", "b"), ("a", "b")]
    with pytest.raises(ShoalError, match="ActorDied"):
        prepare(Story([("a", "b")], [LongWorkError(600), lost]), monkeypatch)
    wrong = Story([("a", "b")], [LongWorkError(600), RequestError("row group 7")])
    wrong.alive = {"a"}
    with pytest.raises(RequestError, match="row group 7"):
        prepare(wrong, monkeypatch)


def test_documents_that_a_node_does_not_see_are_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story([("a", "b")], [LongWorkError(600), NotThereError("node b does not see them"), DONE])
    prepare(story, monkeypatch)
    assert story.ran == ["handing over", ("a", "b"), "here"]
    assert story.released == 1, "nobody holds devices for nothing"
    said = [facts["said"] for kind, facts in story.told if kind == "prepares"]
    assert said[-1] == "node b does not see them; it goes on in one process"


@pytest.mark.parametrize("grants", [[()], [("a", "b")]])
def test_a_job_that_is_to_stop_stops_wherever_it_is(
    grants: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(grants, [LongWorkError(600), STOPPED])
    asked = iter([False] * 5)
    monkeypatch.setattr(story, "is_stopping", lambda: next(asked, True))
    with pytest.raises(StoppedError):
        prepare(story, monkeypatch)
