"""The one actor of a job where its replica groups agree on who takes part."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Collection, Sequence

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actors import NAMESPACE
from cluster.actors.head_actor import was_restarted
from cluster.actors.named_actor import NamedActor
from cluster.node.forked_processes import ForkedProcesses
from cluster.node.node_agent import address_on_node, node_is_kept
from train_jobs.elastic.membership import Beat, Goodbye, Membership, Standing, View, Word
from train_jobs.elastic.store_process import PRELOADED, keep_store

_CALL_TIMEOUT_S = 60.0
_LOOKS_PER_TIMEOUT = 10
_MOST_CALLS = 100_000
"""At a time: groups that wait for a view must not keep heartbeats out."""


def lighthouse_name(job: str, attempt: int) -> str:
    """Name of the lighthouse of one attempt of a job, in Shoal's namespace."""
    return f"shoal-lighthouse-{job}-{attempt}"


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=_MOST_CALLS)
class Lighthouse:
    """Keeps the membership of one job, and the store by which the groups of a view find one another.

    torchft's lighthouse does the same, but has no goodbye (a group that leaves costs the others its heartbeat
    timeout), and answers whoever reaches its port. An actor answers nobody who lacks Ray's token. The store
    is bound to this node's own address.

    After a restart it hears from the groups which view they are in.
    """

    def __init__(self, expected: Collection[str] | None, timeout_s: float) -> None:
        restarted = was_restarted()
        self._membership = Membership([] if restarted else expected, timeout_s)
        # After a restart everybody has to be heard before anybody is thought lost.
        self._open_at = time.monotonic() + timeout_s if restarted else 0.0
        self._news = asyncio.Event()
        self._store: str | None = None
        self._answer: tuple[View, str, bytes] | None = None
        # It takes a while, in which groups that step already must be heard: without that no step counts.
        keeping = keep_store(_forks, ray.util.get_node_ip_address(), self._store_is_at)
        self._keeping = asyncio.get_running_loop().create_task(keeping)
        self._watch = asyncio.get_running_loop().create_task(self._look_again())

    async def expect(self, groups: Collection[str]) -> None:
        """See `Membership.expect`."""
        self._membership.expect(groups)
        self._look()

    async def heartbeats(self, beats: Sequence[Beat]) -> list[Word]:
        """The ranks of a node are there; the answers are in the same order."""
        now = time.monotonic()
        return [self._membership.heard(beat, now) for beat in beats]

    async def remind(self, view: View) -> None:
        """Tell of the view that a group is in, after a restart of this actor."""
        self._membership.remind(view, time.monotonic())

    async def arrive(self, group: str, standing: Standing, rank_count: int) -> bytes:
        """Wait at a step boundary for the next view; returns it with the address of its store, pickled.

        Hundreds of groups are told the same: Ray would pickle it for each of them, in milliseconds.
        """
        self._membership.arrive(group, standing, rank_count, time.monotonic())
        self._decide()
        while True:
            answer = self._membership.answer(group, standing, time.monotonic())
            if isinstance(answer, Goodbye):
                self._decide()  # the others need not wait for it
                return pickle.dumps(answer)
            if answer is not None and self._store is not None:
                told = self._answer
                if told is None or told[0] is not answer or told[1] != self._store:
                    told = self._answer = answer, self._store, pickle.dumps((answer, self._store))
                return told[2]
            await self._news.wait()

    async def leave(self, group: str) -> None:
        """Let a group go at its next step boundary."""
        self._membership.leave(group)
        self._look()

    async def ended(self, group: str) -> None:
        """A group is over."""
        self._membership.ended(group)
        self._look()

    async def view(self) -> View | None:
        return self._membership.view

    def _decide(self) -> bool:
        """Agree on the next view if that is possible now, and let everybody know."""
        now = time.monotonic()
        decided = now >= self._open_at and self._membership.decide(now) is not None
        if decided:
            self._tell()
        return decided

    def _look(self) -> None:
        """Let everybody who waits look whether there is an answer now."""
        if not self._decide():
            self._tell()

    def _store_is_at(self, address: str | None) -> None:
        self._store = address
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _look_again(self) -> None:
        """Silence is no call: it has to be looked for."""
        while True:
            await asyncio.sleep(self._membership.timeout_s / _LOOKS_PER_TIMEOUT)
            self._look()


def _forks() -> ForkedProcesses:
    return ForkedProcesses(PRELOADED, address_on_node(), node_is_kept, title="store")


class LighthouseClient:
    """How a rank, or the driver, talks to the lighthouse of its job.

    Args:
        timeout_s: how long heartbeats may wait for their answers.
    """

    def __init__(self, job: str, attempt: int, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._actor = NamedActor(lighthouse_name(job, attempt), NAMESPACE)
        self._actor.find()

    def expect(self, groups: Collection[str]) -> None:
        """See `Membership.expect`; does not wait."""
        self._actor.tell("expect", list(groups))

    def heartbeats(self, beats: Sequence[Beat]) -> Sequence[Word]:
        """Raises GetTimeoutError where the lighthouse does not answer in time."""
        return self._actor.call("heartbeats", beats, timeout_s=self._timeout_s)

    def say_ended(self, group: str) -> None:
        self._actor.tell("ended", group)

    def remind(self, view: View) -> None:
        self._actor.call("remind", view, timeout_s=_CALL_TIMEOUT_S)

    def arrive(self, group: str, standing: Standing, rank_count: int) -> tuple[View, str] | Goodbye:
        """Waits for the others as long as it takes: the driver sees who does not come."""
        return pickle.loads(self._actor.call("arrive", group, standing, rank_count, timeout_s=None))

    def leave(self, group: str) -> None:
        self._actor.call("leave", group, timeout_s=_CALL_TIMEOUT_S)

    def ended(self, group: str) -> None:
        self._actor.call("ended", group, timeout_s=_CALL_TIMEOUT_S)

    def view(self) -> View | None:
        return self._actor.call("view", timeout_s=_CALL_TIMEOUT_S)


def start_lighthouse(
    job: str, attempt: int, expected: Collection[str] | None, timeout_s: float
) -> ActorHandle:
    """Start the lighthouse of an attempt on this node; it ends with the handle's owner.

    Args:
        expected: the groups that the first view waits for; None: they are told later, see `Membership`.
        timeout_s: seconds of silence after which a group counts as lost.
    """
    return Lighthouse.options(  # type: ignore[attr-defined]
        name=lighthouse_name(job, attempt),
        namespace=NAMESPACE,
        scheduling_strategy=NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        ),
    ).remote(None if expected is None else list(expected), timeout_s)
