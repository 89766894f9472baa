"""The agents of a job, one on each of its nodes, as its driver and its Ray Train workers reach them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from cluster.config.sections.train import TrainJobConfig
from cluster.node.agents import NodeAgents
from cluster.node.forked_processes import ForkedProcesses, ProcessEnd
from cluster.node.node_agent import address_on_node, node_is_kept
from train_jobs.elastic.heartbeats import Hearts
from train_jobs.elastic.lighthouse import LighthouseClient
from train_jobs.elastic.membership import heartbeat_period_s
from train_jobs.group.meetings import Meetings
from train_jobs.group.reports import Reports
from train_jobs.group.restarts import RankReport, Restarts
from train_jobs.rank.link import LinkAddress, RankLink
from train_jobs.spec import GroupSpec, runtime_env_of

PRELOADED = ("train_jobs.rank.process", "transformers.models.llama.modeling_llama")
"""What ranks import, whatever they train."""


class JobAgent(ForkedProcesses):
    """What one job has on a node: its processes are ranks, their owners groups.

    It passes on to the job's other groups that a rank is there, and to the driver that one has failed.

    Args:
        hearts: what takes the ranks' heartbeats to the job's other groups.
    """

    def __init__(
        self,
        preloaded: Sequence[str] = PRELOADED,
        hearts: Hearts | None = None,
    ) -> None:
        address = address_on_node() if ray.is_initialized() else None
        super().__init__(preloaded, address, node_is_kept, title="ranks")
        self._hearts = hearts or Hearts()
        self._heart: RankLink | None = None
        self._opening = asyncio.Lock()
        self._restarts = Restarts()
        self._meetings = Meetings()

    async def run_rank(self, group: str, at: LinkAddress) -> ProcessEnd:
        """Run the process of one rank to its end.

        Args:
            at: where the Ray Train worker answers for it.

        Raises:
            ConnectionError: the fork server has ended, and the process with it.
        """
        arguments = {"address": at.address, "authkey": at.authkey.hex()}
        function = "train_jobs.rank.process:run_rank_process"
        return await self.run(group, function, arguments, f"shoal::Rank:{group}")

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

    async def meet(self, group: str, address: str | None, rank_count: int) -> str:
        """Where the ranks of a group meet that has its rank 0 on this node; see `Meetings.meet`."""
        return await self._meetings.meet(group, address, rank_count)

    def died(self, owner: str) -> None:
        self._hearts.ended(owner)

    async def report(self, group: str, report: RankReport) -> GroupSpec | None:
        """Report how a rank has ended; returns what its worker does next (train_jobs.group.restarts)."""
        return await self._restarts.report(group, report)

    async def reports(self, group: str, more_than: int) -> Sequence[RankReport]:
        """Wait for more reports of a group's ranks on this node than so many; all of them."""
        return await self._restarts.reports(group, more_than)

    async def decide(self, group: str, following: GroupSpec | None) -> None:
        """Tell the workers of a group on this node what comes next."""
        self._restarts.decide(group, following)


class JobAgents(NodeAgents):
    """Those of one job, as its driver keeps them; what a null of `env` passes on is in the driver's own.

    Raises:
        RequestError: it is not.
    """

    def __init__(self, config: TrainJobConfig) -> None:
        super().__init__(JobAgent, runtime_env=runtime_env_of(config, os.environ))

    def reports(self, spec: GroupSpec) -> Reports:
        """What the ranks of a group report from now on."""
        nodes: dict[str, ActorHandle] = self.on(spec.nodes)
        return Reports(spec.name, nodes)

    def decide(self, spec: GroupSpec, following: GroupSpec | None) -> None:
        """Tell the workers of a group whose ranks have ended what comes next; None ends them."""
        for agent in self.there(spec.nodes):
            agent.decide.remote(spec.name, following)
