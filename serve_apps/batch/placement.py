"""The devices of a run: a lease that is kept alive, and a placement group for each replica."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from ray.util import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import ShoalError
from cluster.node.devices import give_back
from cluster.sharing.demand import Demand
from serve_apps.engine.config import replica_bundles
from serve_apps.spec import AppSpec

if TYPE_CHECKING:
    from cluster.sharing.client import BrokerClient

logger = logging.getLogger(__name__)

LEASE_TIMEOUT_S = 30.0
"""How long a run waits for its lease."""
PLACE_TIMEOUT_S = 60.0
"""How long the devices of a lease may take to become free."""
HEARTBEAT_S = 1.0


class Devices:
    """Context: the lease of `replicas` replicas, and their placement groups; all is given back at the end.

    A driver that is killed leaves nothing either: Ray removes its placement groups, and the broker a lease
    that nobody speaks for.

    Args:
        beat: called about once a second meanwhile, from a thread of its own.

    Raises:
        ShoalError: there is no room.
    """

    def __init__(
        self,
        spec: AppSpec,
        holder: str,
        replicas: int,
        broker: BrokerClient,
        beat: Callable[[], None],
        *,
        timeout_s: float = LEASE_TIMEOUT_S,
    ) -> None:
        self._spec = spec
        self._holder = holder
        self._replicas = replicas
        self._broker = broker
        self._beat = beat
        self._timeout_s = timeout_s
        self._bundles = replica_bundles(spec)
        self._groups: list[Any] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease-{holder}", daemon=True)

    def __enter__(self) -> Devices:
        self._broker.wait(self._demand(), self._timeout_s)
        self._thread.start()
        try:
            for number in range(self._replicas):
                name = f"{self._holder}-{number}"
                self._groups.append(
                    placement_group(
                        self._bundles,
                        strategy="STRICT_PACK",
                        name=name,
                        bundle_label_selector=self._spec.bundle_labels(len(self._bundles)),
                    )
                )
            deadline = time.monotonic() + PLACE_TIMEOUT_S
            for group in self._groups:
                if not group.wait(max(0.0, deadline - time.monotonic())):
                    raise ShoalError(
                        f"{self._holder}: the devices of its lease were not free within"
                        f" {PLACE_TIMEOUT_S:.0f} s; `shoal status` says who has what"
                    )
        except BaseException:
            self._end()
            raise
        self._next = itertools.cycle(self._groups)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def first_rank(self) -> dict[str, float]:
        """What the process of a replica's rank 0 takes, in Ray's names."""
        return self._bundles[0]

    def actor_options(self) -> dict[str, Any]:
        """Where the next replica's rank 0 runs, in Ray's options; the other ranks are beside it."""
        strategy = PlacementGroupSchedulingStrategy(next(self._next), placement_group_bundle_index=0)
        return {"scheduling_strategy": strategy}

    def _end(self) -> None:
        self._over.set()
        for group in self._groups:
            give_back(group)
        self._groups = []
        self._thread.join()
        try:
            self._broker.release(self._holder)
        except ShoalError as error:
            logger.warning("%s: the lease ends by itself: %s", self._holder, error)

    def _demand(self) -> Demand:
        held = tuple(node for node in map(_node_of, self._groups) if node is not None)
        return Demand(
            self._holder,
            "serving",
            min=self._replicas,
            max=self._replicas,
            held=held,
            **self._spec.standing,
        )

    def _run(self) -> None:
        while not self._over.wait(HEARTBEAT_S):
            try:
                self._broker.request(self._demand())
                self._beat()
            except (ShoalError, ray.exceptions.RayError) as error:
                # What runs goes on: a broker that restarts hears of it at the next beat.
                logger.warning("%s: no heartbeat: %s", self._holder, error)


def _node_of(group: Any) -> str | None:
    """The node that a placement group is on; None while it has none."""
    row = placement_group_table(group)
    nodes = list(row.get("bundles_to_node_id", {}).values())
    return nodes[0] if row.get("state") == "CREATED" and nodes else None
