"""The fork servers of a job, one on each of its nodes, as its driver and its Ray Train workers reach them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from train_jobs.elastic.heartbeats import Hearts
from train_jobs.elastic.lighthouse import LighthouseClient
from train_jobs.elastic.membership import heartbeat_period_s
from train_jobs.errors import RankError
from train_jobs.rank_link import LinkAddress, RankLink
from train_jobs.restarts import Restarts
from train_jobs.spec import GroupSpec

PRELOADED = ("train_jobs.rank", "transformers.models.llama.modeling_llama")
"""What ranks import, whatever they train."""
_END_TIMEOUT_S = 10.0
_HEARS_TIMEOUT_S = 2.0
"""A node that does not answer for so long is taken for cut off."""


@dataclass(frozen=True)
class RankEnd:
    """How the process of a rank ended.

    Attributes:
        code: its exit code, or minus the number of a signal.
        out_of_memory: the kernel killed it, or another process of its node meanwhile, for want of memory.
    """

    code: int
    out_of_memory: bool

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        how = f"killed by {signal.Signals(-self.code).name}"
        killed_by_kernel = self.out_of_memory and self.code == -signal.SIGKILL
        return f"{how}; its node was running low on memory" if killed_by_kernel else how


@dataclass
class _Rank:
    """A process that was asked for."""

    group: str
    ended: asyncio.Future[RankEnd]
    pid: int | None = None


class NodeForks:
    """Starts the ranks' processes of one job on one node, and sees to their end.

    It ends with the job's driver, the fork server with it, and the processes with that.

    Args:
        hearts: what takes the ranks' heartbeats to the job's other groups.
    """

    def __init__(self, hearts: Hearts | None = None) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ranks: dict[int, _Rank] = {}
        self._next = 0
        self._starting = asyncio.Lock()
        self._hearts = hearts or Hearts()
        self._heart: RankLink | None = None
        self._opening = asyncio.Lock()
        self._ready = asyncio.Event()
        self._restarts = Restarts()

    async def start(self) -> None:
        """Wait until everything that the ranks need is imported."""
        await self._server()
        await self._ready.wait()

    async def heart(self, job: str, attempt: int, timeout_s: float) -> LinkAddress:
        """Where the ranks of an attempt send their heartbeats, of which one must come within the timeout."""

        def open_it() -> LinkAddress:
            def reach() -> LighthouseClient:
                return LighthouseClient(job, attempt, timeout_s)

            self._hearts.open(attempt, reach, heartbeat_period_s(timeout_s))
            self._heart = self._heart or RankLink(self._hearts)
            return self._heart.at

        async with self._opening:
            return await asyncio.to_thread(open_it)

    async def run(self, group: str, at: LinkAddress) -> RankEnd:
        """Run the process of one rank to its end.

        Args:
            at: where the Ray Train worker answers for it.

        Raises:
            ConnectionError: the fork server has ended, and the process with it.
        """
        server = await self._server()
        self._next += 1
        number = self._next
        self._ranks[number] = _Rank(group, asyncio.get_running_loop().create_future())
        request = {"id": number, "address": at.address, "authkey": at.authkey.hex()}
        server.write(json.dumps(request).encode() + b"\n")
        return await self._ranks[number].ended

    async def end(self, group: str) -> None:
        """Kill what is left of a group, even what is stopped."""
        left = [rank for rank in self._ranks.values() if rank.group == group and rank.pid is not None]
        for rank in left:
            assert rank.pid is not None, "it was looked at"
            os.kill(rank.pid, signal.SIGKILL)  # not reaped yet, so that the number is still its own
        await asyncio.gather(*(rank.ended for rank in left), return_exceptions=True)

    async def give_up(self, group: str) -> None:
        """Kill processes of a group that never said a word; where there are none yet, the fork server too."""
        for rank in [each for each in self._ranks.values() if each.group == group]:
            if rank.pid is not None:
                os.kill(rank.pid, signal.SIGKILL)
            elif self._process is not None:
                self._process.kill()  # another one is started for whoever asks next

    async def hears(self) -> None:
        """Answer at once, whatever else goes on."""

    async def report(self, group: str, error: RankError) -> GroupSpec | None:
        """Report that a rank has failed; returns what its worker does next (see train_jobs.restarts)."""
        return await self._restarts.report(group, error)

    async def reports(self, group: str, more_than: int) -> Sequence[RankError]:
        """Wait for more reports of a group's ranks on this node than so many; all of them."""
        return await self._restarts.reports(group, more_than)

    async def decide(self, group: str, following: GroupSpec | None) -> None:
        """Tell the workers of a group on this node what comes next."""
        self._restarts.decide(group, following)

    async def _server(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._writer is None:
                self._ready.clear()
                ours, theirs = socket.socketpair()
                program = [sys.executable, "-m", "train_jobs.fork_server", str(theirs.fileno())]
                self._process = subprocess.Popen(
                    [*program, json.dumps(sys.path), *PRELOADED],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # Asking the driver whether there are GPUs would make CUDA unusable after a fork.
                    env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                )
                theirs.close()
                reader, self._writer = await asyncio.open_connection(sock=ours)
                self._listening = asyncio.create_task(self._listen(reader, self._process))
            return self._writer

    async def _listen(self, reader: asyncio.StreamReader, server: subprocess.Popen[bytes]) -> None:
        # One that is killed before it has read a request resets the connection instead of closing it.
        with suppress(ConnectionError):
            while line := await reader.readline():
                self._hear(json.loads(line))
        self._writer = None  # whoever asks next starts another one
        self._ready.set()  # nobody may wait for ever for one that ended while it imported
        lost, self._ranks = self._ranks, {}
        for rank in lost.values():
            self._hearts.ended(rank.group)
            rank.ended.set_exception(ConnectionError("the fork server of the node has ended"))
        await asyncio.to_thread(server.wait)  # no zombie may stay

    def _hear(self, answer: dict[str, Any]) -> None:
        if not answer:
            self._ready.set()
        elif "pid" in answer:
            self._ranks[answer["id"]].pid = answer["pid"]
        else:
            end = RankEnd(answer["code"], answer["memory"])
            rank = self._ranks.pop(answer["id"])
            if end.code:
                self._hearts.ended(rank.group)
            rank.ended.set_result(end)


_NodeForksActor = ray.remote(num_cpus=0, max_restarts=-1)(NodeForks)


class ForkServers:
    """Those of one job, as its driver keeps them."""

    def __init__(self) -> None:
        self._by_node: dict[str, ActorHandle] = {}
        self._started: dict[str, ray.ObjectRef] = {}

    def start(self, nodes: Iterable[str]) -> None:
        """Have one on each of these nodes; what it imports is there when the first rank starts."""
        for node in set(nodes) - self._by_node.keys():
            # Held to a node: Ray would put an actor without resources anywhere.
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            self._by_node[node] = _NodeForksActor.options(scheduling_strategy=strategy).remote()
            self._started[node] = self._by_node[node].start.remote()

    def ready(self, nodes: Collection[str]) -> bool:
        """Whether those of these nodes have imported everything."""
        started = [self._started[node] for node in set(nodes)]
        return len(ray.wait(started, num_returns=len(started), timeout=0)[0]) == len(started)

    def on(self, nodes: Collection[str]) -> dict[str, ActorHandle]:
        """By node id."""
        self.start(nodes)
        return {node: self._by_node[node] for node in set(nodes)}

    def only(self, nodes: Collection[str]) -> None:
        """End those of all other nodes: they hold memory."""
        for node in self._by_node.keys() - set(nodes):
            ray.kill(self._by_node.pop(node))
            del self._started[node]

    def reports(self, spec: GroupSpec) -> Reports:
        """What the ranks of a group report from now on."""
        return Reports(spec.name, self.on(spec.nodes))

    def decide(self, spec: GroupSpec, following: GroupSpec | None) -> None:
        """Tell the workers of a group whose ranks have failed what comes next; None ends them."""
        for node in set(spec.nodes) & self._by_node.keys():
            self._by_node[node].decide.remote(spec.name, following)

    def end(self, group: str, nodes: Collection[str], timeout_s: float = _END_TIMEOUT_S) -> None:
        """Kill what is left of a group; when this returns in time its devices are free.

        Of a node that cannot be reached nothing is known: it is not waited for.
        """
        actors = [self._by_node[node] for node in set(nodes) & self._by_node.keys()]
        ends = [actor.end.remote(group) for actor in actors]
        if not ends or not timeout_s:
            return
        hears = {actor.hears.remote(): end for actor, end in zip(actors, ends, strict=True)}
        there, _ = ray.wait(list(hears), num_returns=len(hears), timeout=min(timeout_s, _HEARS_TIMEOUT_S))
        if there:
            ray.wait([hears[each] for each in there], num_returns=len(there), timeout=timeout_s)


class Reports:
    """How ranks of a group have failed, as their nodes have told the driver."""

    def __init__(self, group: str, nodes: Mapping[str, ActorHandle]) -> None:
        self._group = group
        self._nodes = nodes
        self._heard: dict[str, Sequence[RankError]] = {}
        self._calls: dict[ray.ObjectRef, str] = {}
        for node in nodes:
            self._ask(node)

    @property
    def calls(self) -> list[ray.ObjectRef]:
        """One of them is ready when there is something new to take."""
        return list(self._calls)

    @property
    def errors(self) -> list[RankError]:
        """By rank."""
        return sorted((error for each in self._heard.values() for error in each), key=lambda each: each.rank)

    def take(self) -> None:
        """Take what has come."""
        if not self._calls:
            return
        for call in ray.wait(self.calls, num_returns=len(self._calls), timeout=0)[0]:
            node = self._calls.pop(call)
            try:
                self._heard[node] = ray.get(call)
            except ray.exceptions.RayError:
                continue  # the node is gone, or its actor: nothing is heard of it any more
            self._ask(node)

    def wait(
        self, enough: Callable[[Sequence[RankError]], bool], timeout_s: float, unless: ray.ObjectRef
    ) -> bool:
        """Wait until there are enough of them; whether there are.

        Args:
            unless: once it is ready, there will be no more.
        """
        deadline = time.monotonic() + timeout_s
        while not enough(self.errors) and (left := deadline - time.monotonic()) > 0:
            if unless in ray.wait([unless, *self.calls], timeout=left)[0]:
                break
            self.take()
        return enough(self.errors)

    def _ask(self, node: str) -> None:
        self._calls[self._nodes[node].reports.remote(self._group, len(self._heard.get(node, ())))] = node
