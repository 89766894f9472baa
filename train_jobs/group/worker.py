"""The Ray Train worker of one rank: it starts the rank's process, speaks for it, and says how it ended.

A process of its own, because a fork has imported everything (cluster.node.fork_server), and because a rank
that hangs or is killed then leaves somebody behind who can tell.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import ray
import ray.train
from ray.actor import ActorHandle

from cluster.actors.named_actor import NamedActor
from cluster.files.storage import Storage
from cluster.files.time_limit import within
from cluster.node.forked_processes import ProcessEnd
from cluster.state.nodes import node_name
from train_jobs.elastic.lighthouse import LighthouseClient
from train_jobs.elastic.membership import Goodbye, Standing, View
from train_jobs.errors import RankError
from train_jobs.group.group_devices import given_gpus
from train_jobs.group.restarts import LEFT, RankReport
from train_jobs.rank.link import LinkAddress, RankLink, RankOrder
from train_jobs.rank.script import RankPlace
from train_jobs.records.control import SAVES_FOR_S, find_control
from train_jobs.records.metric_sender import MetricSender
from train_jobs.spec import LOGS, GroupSpec
from train_jobs.watch.flight_recorder import FlightRecorder
from train_jobs.watch.progress import Activity
from train_jobs.watch.rank_stacks import RankStacks
from train_jobs.watch.rank_watch import RankWatch

_CALL_TIMEOUT_S = 60.0
_VERDICT_TIMEOUT_S = 120.0
"""Longer than any wait before another attempt."""
_LOOK_S = 0.25
_KEEP_S = 10.0
_TURN_LOOK_S = 0.1
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def run_worker(
    spec: GroupSpec, agents: dict[str, ActorHandle], wait_s: float, *, stands_by: bool = False
) -> str:
    """Have the rank trained to its end: "finished", "followed", "stopped" or "left".

    The worker itself has no devices: it may wait for them, and stay when they are given back. Where a rank of
    the job's only group fails, or one of several groups has left, the driver may have the next attempt or
    group started in the same workers (train_jobs.group.restarts).

    Args:
        agents: the job's, by node id.
        wait_s: how long the devices may still be held by the group before this one.
        stands_by: it waits for its first group, as one does whose rank has left.

    Raises:
        RankError: whatever went wrong, in a form that reaches the driver whole.
        NoDevicesError: somebody else has the devices.
    """
    here = agents[ray.get_runtime_context().get_node_id()]
    several = spec.config.group_size is not None
    following: GroupSpec | None
    if stands_by:
        following = _ask_what_next(spec, here, LEFT)
        if following is None:
            return LEFT
        spec = following
    gpus = _Gpus.given(spec, wait_s)
    if not several:
        _await_turn(spec)
    while True:
        try:
            outcome = _run_attempt(spec, agents, gpus)
        except RankError as error:
            following = None if several else _ask_what_next(spec, here, error, _VERDICT_TIMEOUT_S)
            if following is None:
                raise
        else:
            # Who leaves gives its devices back, and waits for others.
            following = _ask_what_next(spec, here, LEFT) if several and outcome == LEFT else None
            if following is None:
                return outcome
            gpus = _Gpus.given(following, 0.0)
        spec = following


def _await_turn(spec: GroupSpec) -> None:
    """Wait until the attempt before has ended: this one may have been given other devices already."""
    control = _control_of(spec)
    while not control.call("is_turn", spec.attempt, spec.nodes, timeout_s=_CALL_TIMEOUT_S):
        time.sleep(_TURN_LOOK_S)


def _control_of(spec: GroupSpec) -> NamedActor:
    control = find_control(spec.job)
    if control is None:
        raise ConnectionError(f"the driver of {spec.job} is gone")
    return control


def _ask_what_next(
    spec: GroupSpec, here: ActorHandle, report: RankReport, timeout_s: float | None = None
) -> GroupSpec | None:
    try:
        return ray.get(here.report.remote(spec.name, report), timeout=timeout_s)
    except (TimeoutError, ray.exceptions.RayError):  # then Ray Train tells the driver
        return None


def _run_attempt(spec: GroupSpec, agents: Mapping[str, ActorHandle], gpus: _Gpus) -> str:
    here = agents[ray.get_runtime_context().get_node_id()]
    heart: LinkAddress | None = None
    if spec.config.group_size is not None:
        timeout_s = spec.config.recovery.heartbeat_timeout_s
        heart = ray.get(here.heart.remote(spec.job, spec.attempt, timeout_s), timeout=_CALL_TIMEOUT_S)
    worker = RankWorker(spec, heart, gpus, agents[spec.nodes[0]])
    link = RankLink(worker)
    try:
        return _see_to_its_end(worker, here, here.run_rank.remote(spec.name, link.at))
    finally:
        worker.over()
        link.close()


def _see_to_its_end(worker: RankWorker, here: ActorHandle, ended: ray.ObjectRef) -> str:
    spec = worker.spec
    while not ray.wait([ended], timeout=_LOOK_S)[0]:
        worker.tell_that_it_saves(time.monotonic())
        try:
            worker.watched.end_if_it_hangs(time.monotonic())
        except RankError:
            if not worker.watched.has_process:
                here.give_up.remote(spec.name)
            raise
    try:
        end: ProcessEnd = ray.get(ended)
        if end.num_left:
            print(f"rank {worker.rank}: {end}", flush=True)
        return worker.outcome(str(end))
    except (ConnectionError, ray.exceptions.RayError) as error:
        return worker.outcome(f"its node's fork server ended ({error})")


@dataclass(frozen=True)
class _Gpus:
    """What a rank is shown.

    Attributes:
        visible: those of all ranks of its group on the node, between which they copy directly; None: whatever
            its node's agent has.
        device: the index of its own among them; None: it has none.
    """

    visible: str | None
    device: int | None

    @classmethod
    def given(cls, spec: GroupSpec, wait_s: float) -> _Gpus:
        """Wait for the devices of a group."""
        own, on_node = given_gpus(spec, ray.train.get_context().get_world_rank(), wait_s)
        if not own:
            return cls(os.environ.get(_VISIBLE), None)
        return cls(",".join(on_node), on_node.index(own[0]))


class _Flights:
    """Where a rank's NCCL writes what it did last: on a disk of the node, wherever the run's files are."""

    def __init__(self, rank: int) -> None:
        self._directory = TemporaryDirectory(prefix="shoal-nccl-", ignore_cleanup_errors=True)
        self.prefix = f"{self._directory.name}/rank-"
        self.recorder = FlightRecorder(self.prefix, rank)

    def take(self) -> bytes | None:
        """What it has written; the directory is gone then."""
        with self._directory:
            return self.recorder.read()


class RankWorker:
    """What a rank's process can ask; see train_jobs.rank.link.Worker.

    Args:
        meeting: the agent of the node that rank 0 is on.
    """

    def __init__(self, spec: GroupSpec, heart: LinkAddress | None, gpus: _Gpus, meeting: ActorHandle) -> None:
        self.spec = spec
        self._meeting = meeting
        self._gpus = gpus
        self._heart = heart
        context = ray.train.get_context()
        self.rank = context.get_world_rank()
        self._place = RankPlace(
            rank=self.rank,
            world_size=context.get_world_size(),
            local_rank=context.get_local_rank(),
            local_world_size=context.get_local_world_size(),
            node_rank=context.get_node_rank(),
            num_nodes=len(set(spec.nodes)),
        )
        self._control = find_control(spec.job)
        self._lighthouse: LighthouseClient | None = None
        self._metrics = MetricSender()
        self._flights = None if gpus.device is None else _Flights(self.rank)
        recorder = None if self._flights is None else self._flights.recorder
        hang_timeout_s = spec.config.recovery.hang_timeout_s
        self.watched = RankWatch(
            self.rank, hang_timeout_s, self._keep_stacks, time.monotonic(), recorder=recorder
        )
        self._over = threading.Event()
        self._told_at = -math.inf
        self._status: str | None = None
        self._error: RankError | None = None

    def order(self) -> RankOrder:
        context, visible = ray.get_runtime_context(), self._gpus.visible
        return RankOrder(
            spec=self.spec,
            place=self._place,
            host=ray.util.get_node_ip_address(),
            node=node_name(context.get_node_id()),
            device=self._gpus.device,
            environment={} if visible is None else {_VISIBLE: visible},
            heart=self._heart,
            flights=None if self._flights is None else self._flights.prefix,
        )

    def rendezvous(self, address: str | None) -> str:
        if address is not None and self._place.world_size == 1:
            return address
        return ray.get(self._meeting.meet.remote(self.spec.name, address, self._place.world_size))

    def metric(self, line: dict[str, Any]) -> bool:
        """Log a step; whether the job is to stop, see `MetricSender.send`."""
        return self._metrics.send(self._reach_control(), line, _CALL_TIMEOUT_S)

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        self._reach_control().call("event", kind, timeout_s=_CALL_TIMEOUT_S, named=facts)

    def is_stopping(self) -> bool:
        return self._reach_control().call("is_stopping", timeout_s=_CALL_TIMEOUT_S)

    def leave(self) -> None:
        facts = {"attempt": self.spec.attempt, "group": self.spec.name}
        self.event("leaving", {**facts, "reason": f"a SIGTERM to rank {self.rank}"})
        if self.spec.config.group_size is None:
            self._reach_control().call("stop", timeout_s=_CALL_TIMEOUT_S)
        else:
            self._reach_lighthouse().leave(self.spec.name)

    def remind(self, view: View) -> None:
        self._reach_lighthouse().remind(view)

    def arrive(self, group: str, standing: Standing, rank_count: int) -> tuple[View, str] | Goodbye:
        return self._reach_lighthouse().arrive(group, standing, rank_count)

    def watch(self, pid: int, stacks: int) -> None:
        self.watched.watch(RankStacks(pid, stacks))

    def progress(self, activity: Activity) -> None:
        self.watched.heard(activity, time.monotonic())

    def tell_that_it_saves(self, now: float) -> None:
        """Tell the job's control again and again while the rank saves: who waits for it to go waits on."""
        if self.watched.saves and now - self._told_at > SAVES_FOR_S / 4:
            self._told_at = now
            self._reach_control().tell("saves", self.spec.name)

    def finish(self, status: str) -> None:
        self._status = status

    def fail(self, error: RankError) -> None:
        self._error = error

    def stay(self) -> None:
        self._over.wait()

    def over(self) -> None:
        """Nobody answers for the rank any more; what NCCL has written down of it goes to the logs."""
        written = None if self._flights is None else self._flights.take()
        self._over.set()
        self._metrics.finish(_KEEP_S)
        if written is not None:
            self._keep(f"nccl-of-{self.spec.name}-rank-{self.rank}", written)

    def outcome(self, how_it_ended: str) -> str:
        """What the rank said at its end.

        Raises:
            RankError: an exception that it named, or that it ended without a word.
        """
        if self._error is not None:
            raise self._error
        if self._status is None:
            raise RankError(self.rank, None, "RankDied", how_it_ended, "", died=True)
        return self._status

    def _keep_stacks(self, stacks: str) -> None:
        # The driver prints them as well.
        self._keep(f"rank-{self.rank}-of-{self.spec.name}.stack", stacks.encode())

    def _keep(self, name: str, content: bytes) -> None:
        """Leave a file with the logs of the attempt."""

        def write() -> bool:
            logs = Storage(self.spec.run).child(LOGS)
            logs.write_bytes(f"attempt-{self.spec.attempt}/{name}", content)
            return True

        if not within(_KEEP_S, write, otherwise=False):
            print(f"{name} could not be written", flush=True)

    def _reach_control(self) -> NamedActor:
        self._control = self._control or _control_of(self.spec)
        return self._control

    def _reach_lighthouse(self) -> LighthouseClient:
        if self._lighthouse is None:
            self._lighthouse = LighthouseClient(self.spec.job, self.spec.attempt)
        return self._lighthouse
