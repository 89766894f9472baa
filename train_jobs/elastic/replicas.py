"""One rank's part in the quorum of its job's replica groups."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from train_jobs.checkpoint.state import TrainingState
from train_jobs.data.order import Place
from train_jobs.elastic.buckets import GradientBuckets
from train_jobs.elastic.exchange import Exchange
from train_jobs.elastic.membership import (
    NO_STATE,
    Beat,
    Goodbye,
    Standing,
    View,
    Word,
    heartbeat_period_s,
)
from train_jobs.elastic.quorum import Left
from train_jobs.elastic.transfer import State, Transfer
from train_jobs.metering.stragglers import Rank
from train_jobs.parallel.agreement import from_rank_0
from train_jobs.watch.progress import Progress

_LOOK_S = 0.05
"""How soon who waits for a state sees that a group is gone."""


class RankLighthouse(Protocol):
    """Where the groups of a job agree; see train_jobs.elastic.lighthouse."""

    def heartbeat(self, beat: Beat, at_once: bool) -> Word:
        """Say that a rank is there, at once or when the next heartbeats of its node are due."""

    def remind(self, view: View) -> None: ...

    def arrive(self, group: str, standing: Standing, rank_count: int) -> tuple[View, str] | Goodbye: ...


class Changes(Protocol):
    """Where rank 0 of the leading group says that the groups have changed."""

    def __call__(self, kind: str, **facts: Any) -> None: ...


@dataclass(frozen=True)
class ReplicaSettings:
    """How groups are tied.

    Attributes:
        group: the group's name, unique in the job.
        heartbeat_timeout_s: silence after which a group counts as lost.
        hang_timeout_s: longest that a collective or a message may take.
        bucket_bytes: of the buckets in which gradients travel.
        dtype: what travels in place of the gradients' own precision.
        gradient_as_bucket_view: let gradients lie in the buckets where they can.
    """

    group: str
    heartbeat_timeout_s: float
    hang_timeout_s: float
    bucket_bytes: float
    dtype: torch.dtype | None = None
    gradient_as_bucket_view: bool = True


class ReplicaQuorum:
    """Ties the replica groups of a job: all have the same state after every step that counts.

    A step counts for a group when its gradients and its totals came through on all its ranks. Where it came
    through in one group and not in another, the latter takes the former's state: nobody goes back.

    A step counts only while the lighthouse cannot have given this rank up: it has answered a heartbeat that
    was sent less than the timeout ago, and knew of no other view. Otherwise a group that stood still for a
    while, and was replaced, would go on beside those that took its place.

    Args:
        state: the rank's training state; `restore` fills it from the newest good checkpoint.
        progress: told when the rank only waits.
        restore: called by all groups where none has a state, with whether this is the leading one.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        lighthouse: RankLighthouse,
        state: TrainingState,
        restore: Callable[[bool], None],
        event: Changes,
        progress: Progress | None = None,
    ) -> None:
        self.settings = settings
        self.state = state
        self.mesh = state.parallel.mesh
        self._lighthouse = lighthouse
        self._restore = restore
        self._event = event
        self._progress = progress or Progress()
        module = state.parallel.module
        self._exchange = Exchange(self.mesh.device, settings.hang_timeout_s)
        self._buckets = GradientBuckets(
            [*module.parameters()],
            self._exchange,
            settings.bucket_bytes,
            settings.dtype,
            settings.gradient_as_bucket_view,
        )
        self._transfer = Transfer(settings.hang_timeout_s)
        self._statistics = _statistics(module)
        # Where the strategy reduces within the group, a rank has peers at its own place in the others only.
        self._alike = not state.parallel.reduces
        self._view: View | None = None
        self._has_state = False
        self.began = 0
        self._changes = False
        """All ranks have agreed that the next step needs a new view."""
        self._noticed = 0
        """The number of the view of which this rank has heard that it does."""
        self._sending: Future[None] | None = None
        self._receiving: Future[State] | None = None
        self._before: tuple[dict[str, Any], list[Tensor]] | None = None
        self.place: Place | None = None
        self.ranks: list[Rank] = []
        self._ended = threading.Event()
        self._confirmed: tuple[int, float] = (0, -math.inf)
        """The view of which the lighthouse last said that it holds, and when it was asked."""
        self._beat_now = threading.Event()
        self._heard = threading.Condition()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    @property
    def leads(self) -> bool:
        return self._view is not None and self._view.groups[0] == self.settings.group

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        return self.ranks.index((self.settings.group, dist.get_rank()))

    def close(self) -> None:
        """Stop the heartbeats."""
        self._ended.set()
        self._beat_now.set()

    # -- a step -------------------------------------------------------------------------------------------

    def start(self) -> Place | None:
        while self._view is None or self._changes or self._exchange.failure is not None:
            self._agree()
        self._before = (self.state.randomness(), [each.clone() for each in self._statistics])
        if self.place is None:
            self._buckets.arm()  # it contributes zeros, and hears what the others found
        return self.place

    def last_backward(self) -> None:
        self._buckets.arm()

    def total(self, sums: Tensor) -> Tensor | None:
        # The others may not have come to this step yet: the leading one saves between steps.
        with self._progress.exchanging():
            return self._total(sums)

    def _total(self, sums: Tensor) -> Tensor | None:
        view = self._view
        assert view is not None, "a step has begun"
        self._take_state()
        self._await_confirmation(view)
        self._buckets.finish()
        self._share_statistics()
        # The last two are for the quorum itself: whoever heard of a change, and whoever lost a peer.
        vector = torch.cat((sums, sums.new_tensor([float(self._noticed == view.number), 0.0])))
        if self._exchange.failure is not None or not self._exchange.sum(vector):
            vector.zero_()
            vector[-1] = 1.0
        if dist.get_world_size() > 1:
            vector = self._with_own_group(vector)
        *_, noticed, lost = vector.tolist()
        if self._exchange.is_late and not lost:
            # What was read may be what an operation left behind that was aborted: the device knows it now.
            lost = not self._came_through()
        if noticed:
            self._changes = True
        if lost:
            self._exchange.give_up("a rank of this group lost a peer")
            self._changes = True
            return None
        self.place = self._place_among(view.groups)  # whoever took a state has it now
        return vector[:-2]

    def hold(self) -> None:
        if self._sending is None:
            return
        sending, self._sending = self._sending, None
        self._wait_for(sending)
        if sending.done() and sending.exception() is not None:
            assert self._view is not None, "something was sent"
            self._noticed = self._view.number  # whoever waited for it is gone, or asks again

    def drop(self) -> None:
        assert self._before is not None, "a step has begun"
        randomness, statistics = self._before
        self.state.restore_randomness(randomness)
        for buffer, value in zip(self._statistics, statistics, strict=True):
            buffer.copy_(value)

    def forget(self) -> None:
        self._has_state, self._changes = False, True

    def _await_confirmation(self, view: View) -> None:
        """Wait until the lighthouse has said lately that the view holds, or the exchange has failed."""

        def is_known() -> bool:
            number, asked_at = self._confirmed
            confirmed = (
                number == view.number and time.monotonic() - asked_at < self.settings.heartbeat_timeout_s
            )
            return confirmed or self._exchange.failure is not None

        if is_known():
            return
        self._beat_now.set()
        with self._progress.meeting(), self._heard:
            while not self._heard.wait_for(is_known, timeout=_LOOK_S):
                pass

    def _with_own_group(self, vector: Tensor) -> Tensor:
        """What all ranks of this group make of it together: where one lost a peer, all of them did."""
        lost = vector[-1:].clone()
        if self._alike:  # all have the same sums
            dist.all_reduce(lost, op=dist.ReduceOp.MAX)
            return torch.cat((vector[:-1], lost))
        dist.all_reduce(vector)
        return vector

    def _came_through(self) -> bool:
        """Whether the device has confirmed the step on all ranks of this group."""
        came = self._exchange.came_through()
        if dist.get_world_size() > 1:
            lost = torch.tensor([float(not came)])  # on the CPU, where it waits for nothing of the device
            dist.all_reduce(lost, op=dist.ReduceOp.MAX)
            came = not lost.item()
        return came

    @torch.no_grad()
    def _share_statistics(self) -> None:
        """Batch statistics are the first rank's everywhere, as under DistributedDataParallel."""
        if not self._statistics or self._exchange.alone:
            return
        first = self.leads and dist.get_rank() == 0
        flat = torch.cat([each.double().flatten() for each in self._statistics])
        if not first:
            flat.zero_()
        if self._exchange.sum(flat):
            parts = flat.split([each.numel() for each in self._statistics])
            for buffer, part in zip(self._statistics, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

    # -- views --------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Meet the other groups, and learn who goes on from which state."""
        began = time.perf_counter()
        with self._progress.meeting(), self._progress.exchanging():
            answer = self._arrive()
        if isinstance(answer, Goodbye):
            self.close()
            raise Left(answer.last)
        view, store = answer
        before, self._view = self._view, view
        self._beat_now.set()
        self.ranks = [(group, rank) for group in view.groups for rank in range(dist.get_world_size())]
        self._changes = False
        if view.standing == NO_STATE:
            with self._progress.starting():
                self._restore(self.leads)
            self._has_state, self._changes, self.began = True, True, view.number
        else:
            self._meet(view, store)
        joined = [] if before is None else [each for each in view.groups if each not in before.groups]
        if self.leads and dist.get_rank() == 0 and (joined or view.left or view.lost):
            self._event(
                "resized",
                step=self.state.step,
                groups=len(view.groups),
                members=list(view.groups),
                world_size=self.world_size,
                joined=joined,
                left=list(view.left),
                lost=list(view.lost),
                agreed_s=round(time.perf_counter() - began, 3),
            )

    def _arrive(self) -> tuple[View, str] | Goodbye:
        mine = NO_STATE
        if self._has_state:
            mine = Standing(self.began, self.state.guard.went_back, self.state.step)
        group, ranks = self.settings.group, dist.get_world_size()
        return from_rank_0(lambda: self._lighthouse.arrive(group, mine, ranks), self.mesh.patient)

    def _meet(self, view: View, store: str) -> None:
        group, rank, ranks = self.settings.group, dist.get_rank(), dist.get_world_size()
        index, name = view.groups.index(group), f"{group}/{rank}"
        at = f"{store}/{view.number}"
        if self._alike:
            self._exchange.configure(f"{at}/all", name, index * ranks + rank, len(view.groups) * ranks)
        else:
            self._exchange.configure(f"{at}/{rank}", name, index, len(view.groups))
        self._sending = self._receiving = None
        source, receivers = view.source(group), view.receivers(group)
        if source is not None:
            self.place = None
            self.state.step, self.began = view.standing.step, view.standing.began
            peers = view.receivers(source)
            self._receiving = self._transfer.receive(
                f"{at}/state/{source}/{rank}", name, peers.index(group), len(peers), view.standing.step
            )
            return
        self.place = self._place_among(view.current)
        if receivers:
            self._sending = self._transfer.send(
                f"{at}/state/{group}/{rank}", name, self.state.handed_on(), len(receivers), view.standing.step
            )

    def _place_among(self, groups: Sequence[str]) -> Place:
        data = self.mesh.shape.num_data_ranks
        index = groups.index(self.settings.group) * data + self.mesh.data_index
        return Place(index, len(groups) * data, data)

    def _take_state(self) -> None:
        """Wait for the state that another group sends."""
        if self._receiving is None:
            return
        receiving, self._receiving = self._receiving, None
        self._wait_for(receiving)
        if not receiving.done() or receiving.exception() is not None:
            self._exchange.give_up("the state did not come through")
            return
        self.state.take(receiving.result())
        self._has_state = True

    def _wait_for(self, transfer: Future[Any]) -> None:
        """Wait for the end of a transfer, or until there is no use in it."""
        with self._progress.meeting():
            while self._exchange.failure is None and not wait([transfer], timeout=_LOOK_S).done:
                pass

    # -- heartbeats ---------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Say that this rank is there, and hear of changes."""
        group, rank = self.settings.group, dist.get_rank()
        # Its node sends one a period: whoever has had an answer is there again before the next is due.
        pause = heartbeat_period_s(self.settings.heartbeat_timeout_s) / 2
        while True:
            at_once = self._beat_now.wait(pause)
            self._beat_now.clear()
            if self._ended.is_set():
                return
            view, asked_at = self._view, time.monotonic()
            try:
                number = 0 if view is None else view.number
                beat = Beat(group, rank, number, saves=self._progress.saves)
                word = self._lighthouse.heartbeat(beat, at_once)
                if word.forgotten and view is not None:
                    self._lighthouse.remind(view)
                    self._beat_now.set()
            except Exception:  # noqa: BLE001  (it is away; the groups go on as they are)
                continue
            self._progress.others_save = word.saves
            if view is not self._view:
                continue  # the answer is about a view that is over
            if word.change:
                self._noticed = number
            with self._heard:
                if word.broken and view is not None:
                    self._exchange.give_up("this view is over, or a group of it is gone")
                elif not word.forgotten:
                    self._confirmed = number, asked_at
                self._heard.notify_all()


def _statistics(module: nn.Module) -> Sequence[Tensor]:
    """Running means and variances: what forward passes change."""
    return [
        buffer
        for each in module.modules()
        if isinstance(each, _BatchNorm)
        for buffer in each.buffers(recurse=False)
    ]
