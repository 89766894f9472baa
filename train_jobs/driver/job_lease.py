"""A job's lease on workers of the cluster, and what is known of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import ray

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import ShoalError
from cluster.sharing.client import BrokerClient
from cluster.sharing.demand import Demand, Grant
from cluster.sharing.node_health import Against
from cluster.state.nodes import alive_nodes
from train_jobs.driver.failures import Failure

RENEW_S = 0.5
"""How often the lease is renewed, while the broker has no news of it."""


class JobLease:
    """What one job asks the broker for, by whole units: workers that stand together on one node.

    A broker that is away is no reason to stop: it is rebuilt from what holders say.

    Attributes:
        units: those of one replica group; None where all workers of the job are one group.
        elastic: the job takes more and fewer workers.
        least: how many units the job needs.
    """

    def __init__(self, job: str, config: TrainJobConfig, broker: BrokerClient) -> None:
        self.holder = f"job/{job}"
        self.config = config
        self.broker = broker
        self.unit_size = config.unit_size
        self.least = config.workers.min // self.unit_size
        self.elastic = config.workers.min < config.workers.most
        self.units = None if config.group_size is None else config.group_size // self.unit_size
        self.news: tuple[ray.ObjectRef, ...] = ()
        """What is answered when the grant is another than at the last renewal; none where that failed."""

    def wait(self, stop: Callable[[], bool], say: Callable[[str], None]) -> Grant:
        """Wait for a grant between the job's minimum and its most workers, or until it is to stop.

        Args:
            say: told why it waits, whenever that is another reason than before.
        """
        return self.broker.wait(self._demand(), timeout_s=None, stop=stop, on_wait=say)

    def preview(self) -> Sequence[str]:
        """The nodes of the units that it would have if it asked now, or be kept; none where nobody knows."""
        try:
            grant = self.broker.preview(self._demand())
        except ShoalError:
            return ()
        return () if grant is None else (*grant.nodes, *grant.coming)

    def renew(self, held: Sequence[str], starting: Sequence[str] = ()) -> Grant | None:
        """Renew the lease on units that run, those of a replica group side by side.

        Args:
            starting: those of them that do not step yet.

        Returns:
            what is granted now; None where the broker is away.
        """
        try:
            grant = self.broker.request(self._demand(held, starting))
            self.news = (self.broker.watch({self.holder: grant}, RENEW_S),)
        except ShoalError as error:
            print(f"the lease could not be renewed: {error}", flush=True)
            self.news = ()
            return None
        return grant

    def release(self) -> None:
        """End the lease; one that cannot be ended now runs out by itself."""
        try:
            self.broker.release(self.holder)
        except ShoalError as error:
            print(f"the lease could not be released: {error}", flush=True)

    def workers(self, grant: Grant) -> int:
        return grant.units * self.unit_size

    def alive_of(self, nodes: Collection[str]) -> set[str]:
        """Those of a failed group's nodes that are there; a dead worker may be the first sign."""
        alive = alive_nodes() & set(nodes)
        try:
            return alive - set(self.broker.suspect(nodes))
        except ShoalError as error:
            print(f"whether the nodes are there is not known: {error}", flush=True)
            return alive

    def blame(self, failure: Failure, step: int, *, elsewhere: bool) -> None:
        """Tell the broker of a failure that speaks against a node.

        Args:
            step: steps that the job had done.
            elsewhere: it had ranks on other nodes, too.
        """
        if not failure.by_node or failure.node_id is None:
            return
        against: Against = failure.failure_class.value  # type: ignore[assignment]
        try:
            self.broker.blame(failure.node_id, self.holder, against, step, elsewhere=elsewhere)
        except ShoalError as error:
            print(f"the failure of {failure.node} could not be reported: {error}", flush=True)

    def _demand(self, held: Sequence[str] = (), starting: Sequence[str] = ()) -> Demand:
        workers = self.config.workers
        unit = {"CPU": float(workers.cpus * self.unit_size), "GPU": float(workers.gpus * self.unit_size)}
        least, most = self.least, workers.most // self.unit_size
        return Demand(
            holder=self.holder,
            kind="training",
            unit={name: amount for name, amount in unit.items() if amount},
            min=least,
            max=most,
            held=tuple(held),
            # What comes and goes together: a replica group, or all workers of a job of a fixed number.
            gang=self.units or (1 if self.elastic else max(1, least)),
            priority=self.config.priority,
            weight=self.config.weight,
            accelerator=self.config.accelerator,
            apart=workers.per_node is not None,
            starting=tuple(starting),
            rebuilds=self.units is None,
        )
