"""How the ranks of a group have ended, as the agents of their nodes tell the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import ray
from ray.actor import ActorHandle

from train_jobs.errors import RankError
from train_jobs.group.restarts import LEFT, RankReport


class Reports:
    """Those of one group, from now on."""

    def __init__(self, group: str, nodes: Mapping[str, ActorHandle]) -> None:
        self._group = group
        self._nodes = nodes
        self._heard: dict[str, Sequence[RankReport]] = {}
        self._calls: dict[ray.ObjectRef, str] = {}
        for node in nodes:
            self._ask(node)

    @property
    def calls(self) -> list[ray.ObjectRef]:
        """One of them is ready when there is something new to take."""
        return list(self._calls)

    @property
    def errors(self) -> list[RankError]:
        """Of those that have failed, by rank."""
        errors = [error for each in self._heard.values() for error in each if error != LEFT]
        return sorted(errors, key=lambda each: each.rank)

    @property
    def num_left(self) -> int:
        """How many have left."""
        return sum(report == LEFT for each in self._heard.values() for report in each)

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
