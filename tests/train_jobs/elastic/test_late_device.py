"""Sums on a device that does its work later: what `wait` returned before is not believed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from train_jobs.data.order import Place
from train_jobs.elastic.exchange import Exchange
from train_jobs.elastic.membership import Standing, View
from train_jobs.elastic.replicas import ReplicaQuorum, ReplicaSettings
from train_jobs.parallel.rendezvous import open_store
from train_jobs.watch.progress import Progress

CUDA = torch.device("cuda", 0)


class LateWork:
    """What a GPU gives back: nothing has happened yet when `wait` returns."""

    def wait(self) -> bool:
        return True


class LateGroup:
    """Peers on GPUs; the sums are the values before, or whatever an aborted operation left."""

    def __init__(self, error: Exception | None = None, left_behind: float | None = None) -> None:
        self.error = error
        self._left_behind = left_behind
        self.aborted = False
        self.asked = 0

    def allreduce(self, tensors: list[Tensor], options: Any) -> LateWork:
        for tensor in tensors:
            if self._left_behind is not None:
                tensor.fill_(self._left_behind)
        return LateWork()

    def errored(self) -> Exception | None:
        self.asked += 1
        return self.error

    def abort(self) -> None:
        self.aborted = True


def late_exchange(group: LateGroup) -> Exchange:
    exchange = Exchange(CUDA, 5.0)
    exchange._group = cast(Any, group)
    return exchange


def test_a_sum_on_a_device_is_right_only_once_the_device_says_so() -> None:
    for error in (None, RuntimeError("NCCL communicator was aborted")):
        group = LateGroup(error)
        exchange = late_exchange(group)
        assert exchange.is_late
        assert exchange.sum(torch.ones(1)), "until then nothing is known"
        assert exchange.came_through() is (error is None)
        assert exchange.failure is error
    assert not Exchange(torch.device("cpu"), 5.0).is_late


def test_who_gives_up_aborts_what_the_device_waits_for() -> None:
    group = LateGroup()
    exchange = late_exchange(group)
    exchange.give_up("a group is gone")
    assert group.aborted
    assert not exchange.came_through()
    assert group.asked == 0, "it is known already"


def test_the_thread_that_meets_takes_its_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, int]] = []

    class Group(LateGroup):
        def __init__(self, timeout: object) -> None:
            super().__init__()

        def configure(self, *_: object) -> None:
            found.append(("configure", threading.get_ident()))

    def set_device(device: torch.device) -> None:
        assert device == CUDA
        found.append(("device", threading.get_ident()))

    monkeypatch.setattr("train_jobs.elastic.exchange.ProcessGroupNCCL", Group)
    monkeypatch.setattr("torch.cuda.set_device", set_device)
    exchange = Exchange(CUDA, 5.0)
    exchange.configure("nobody:0/1", "a/0", 0, 2)
    assert [what for what, _ in found] == ["device", "configure"]
    assert len({thread for _, thread in found}) == 1
    assert exchange.failure is None


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    store, _ = open_store("127.0.0.1")
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Nothing:
    def finish(self) -> None: ...


def quorum_over(group: LateGroup) -> ReplicaQuorum:
    """One that has begun a step, as far as `total` looks at it."""
    quorum = ReplicaQuorum.__new__(ReplicaQuorum)
    quorum.settings = ReplicaSettings("a", 2.0, 5.0, 1e6)
    quorum._exchange = late_exchange(group)
    quorum._buckets = cast(Any, _Nothing())
    quorum._view = View(1, ("a", "b"), (Standing(1, 0, 5), Standing(1, 0, 5)))
    quorum._receiving = None
    quorum._statistics = []
    quorum._alike = True
    quorum._progress = Progress()
    quorum._noticed = 0
    quorum._changes = False
    quorum._confirmed = (1, float("inf"))
    quorum._place_among = lambda groups: Place(0, len(groups), 1)  # type: ignore[method-assign]
    return quorum


@pytest.mark.usefixtures("group_of_one")
def test_a_step_does_not_count_before_the_device_has_confirmed_it() -> None:
    sums = torch.tensor([2.5, 8.0])
    quorum = quorum_over(LateGroup())
    totals = quorum.total(sums)
    assert totals is not None
    assert totals.tolist() == [2.5, 8.0]
    assert not quorum._changes

    # The other group was lost while the device worked: `wait` knew nothing, and what was read looks fine.
    group = LateGroup(RuntimeError("aborted"))
    quorum = quorum_over(group)
    assert quorum.total(sums) is None
    assert quorum._changes, "the next step needs another view"
    assert quorum._exchange.failure is not None
    assert group.asked == 1


@pytest.mark.usefixtures("group_of_one")
def test_what_an_aborted_sum_left_behind_is_no_word_of_anybody() -> None:
    quorum = quorum_over(LateGroup(RuntimeError("aborted"), left_behind=0.0))
    assert quorum.total(torch.tensor([2.5, 8.0])) is None
