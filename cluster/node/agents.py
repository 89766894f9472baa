"""The agents of several nodes, as whoever has processes there keeps them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.node.forked_processes import ForkedProcesses

_END_TIMEOUT_S = 10.0
_HEARS_TIMEOUT_S = 2.0
"""A node that does not answer for so long is taken for cut off."""


class NodeAgents:
    """One on each node where it is wanted; they end with the process that keeps them.

    Args:
        kind: what they are.
        arguments: what each of them is made of.
        runtime_env: Ray's, of the agents and of the processes that they start; beside that of the job.
    """

    def __init__(
        self, kind: type[ForkedProcesses], *arguments: Any, runtime_env: Mapping[str, Any] | None = None
    ) -> None:
        options = {"runtime_env": dict(runtime_env)} if runtime_env else {}
        self._kind: Any = ray.remote(num_cpus=0, max_restarts=-1, **options)(kind)
        self._arguments = arguments
        self._by_node: dict[str, ActorHandle] = {}
        self._started: dict[str, ray.ObjectRef] = {}

    def start(self, nodes: Iterable[str]) -> None:
        """Have one on each of these nodes; what it imports is there when the first process starts."""
        for node in set(nodes) - self._by_node.keys():
            # Held to a node: Ray would put an actor without resources anywhere.
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            agent = self._kind.options(scheduling_strategy=strategy).remote(*self._arguments)
            self._by_node[node], self._started[node] = agent, agent.start.remote()

    def ready(self, nodes: Collection[str]) -> bool:
        """Whether those of these nodes have imported everything."""
        started = [self._started[node] for node in set(nodes)]
        return len(ray.wait(started, num_returns=len(started), timeout=0)[0]) == len(started)

    def on(self, nodes: Collection[str]) -> dict[str, ActorHandle]:
        """By node id; those that are not there yet are started."""
        self.start(nodes)
        return {node: self._by_node[node] for node in set(nodes)}

    def there(self, nodes: Collection[str]) -> list[ActorHandle]:
        """Those of these nodes that were started."""
        return [self._by_node[node] for node in set(nodes) & self._by_node.keys()]

    def only(self, nodes: Collection[str]) -> None:
        """End those of all other nodes: they hold memory."""
        for node in self._by_node.keys() - set(nodes):
            ray.kill(self._by_node.pop(node))
            del self._started[node]

    def end(self, owner: str, nodes: Collection[str], timeout_s: float = _END_TIMEOUT_S) -> None:
        """Kill what is left of an owner's processes; when this returns in time its devices are free.

        Of a node that cannot be reached nothing is known: it is not waited for.
        """
        agents = self.there(nodes)
        ends = [agent.end.remote(owner) for agent in agents]
        if not ends or not timeout_s:
            return
        hears = {agent.hears.remote(): end for agent, end in zip(agents, ends, strict=True)}
        there, _ = ray.wait(list(hears), num_returns=len(hears), timeout=min(timeout_s, _HEARS_TIMEOUT_S))
        if there:
            ray.wait([hears[each] for each in there], num_returns=len(there), timeout=timeout_s)
