"""Wants and grants: how many replicas the load asks for, and how many of them the broker allows.

Serve pickles this module by value into its controller: it stands alone, and imports lazily.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

logger = logging.getLogger("ray.serve")

HEARTBEAT_S = 1.0
"""How often a want that did not change is told to the broker again."""
SILENCE_S = 1.0
"""Seconds after the policy's last call for which its app counts as being there."""


@dataclass
class Wants:
    """From load and time to replicas: pure arithmetic, with the clock passed in.

    The want rises when the load has asked for more during the whole of `upscale_delay_s`, to the least
    that was asked for meanwhile; it falls, likewise, to the most asked for during `downscale_delay_s`.
    """

    min_replicas: int
    max_replicas: int
    target_ongoing_requests: float
    upscale_delay_s: float
    downscale_delay_s: float
    want: int = 0
    _since: float | None = field(default=None, repr=False)
    _side: int = field(default=0, repr=False)
    _bound: int = field(default=0, repr=False)

    def update(self, ongoing: float, now: float) -> int:
        """The replicas wanted at `now` (seconds) under `ongoing` requests in flight or waiting."""
        asked = math.ceil(ongoing / self.target_ongoing_requests)
        asked = max(self.min_replicas, min(self.max_replicas, asked))
        self.want = max(self.min_replicas, min(self.max_replicas, self.want))
        side = (asked > self.want) - (asked < self.want)
        if side == 0 or side != self._side:
            self._side, self._since, self._bound = side, now, asked
        self._bound = min(self._bound, asked) if side > 0 else max(self._bound, asked)
        delay_s = self.upscale_delay_s if side > 0 else self.downscale_delay_s
        if side and self._since is not None and now - self._since >= delay_s:
            self.want = self._bound
            self._side, self._since = 0, None
        return self.want


class LeaseKeeper:
    """Tells the broker an app's wants from a thread of its own and keeps its last answer.

    The thread lives while `tell` is called: an app that Serve has forgotten stops asking, and its lease
    ends by itself.

    Args:
        ask: from replicas wanted to replicas granted; it may take its time and may fail.
    """

    def __init__(self, app: str, ask: Callable[[int], int]) -> None:
        self._app = app
        self._ask = ask
        self._want = 0
        self._told_at = 0.0
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self.granted: int | None = None
        """Replicas that the broker's last answer allows (a dead broker changes nothing); None before."""

    def tell(self, want: int) -> None:
        """The app wants this many replicas now; returns at once."""
        self._told_at = time.monotonic()
        if want != self._want:
            self._want = want
            self._changed.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=f"lease-{self._app}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while time.monotonic() - self._told_at < SILENCE_S:
            self._changed.clear()
            try:
                self.granted = self._ask(self._want)
            except Exception as error:  # noqa: BLE001 - whatever it is, the replicas that run must go on
                logger.warning("app %s: no broker, keeping the last grant: %r", self._app, error)
            self._changed.wait(HEARTBEAT_S)


def ask_broker(app: str, unit: Mapping[str, float], min_replicas: int, want: int) -> int:
    """Register what an app wants with the broker; the replicas that are granted."""
    from cluster.sharing.client import BrokerClient
    from cluster.sharing.demand import Demand

    demand = Demand(
        holder=f"app/{app}",
        kind="serving",
        unit=unit,
        min=min_replicas,
        max=max(min_replicas, want),
        held=replica_nodes(app),
    )
    return BrokerClient().request(demand).units


class ServingPolicy:
    """The autoscaling policy of an app's deployment: min(want, grant).

    Serve makes one in its controller and calls it several times a second; the delays are carried out
    here, so Serve's own are set to 0.
    """

    def __init__(
        self,
        app: str,
        unit: Mapping[str, float],
        min_replicas: int,
        max_replicas: int,
        target_ongoing_requests: float,
        upscale_delay_s: float,
        downscale_delay_s: float,
    ) -> None:
        self._wants = Wants(
            min_replicas, max_replicas, target_ongoing_requests, upscale_delay_s, downscale_delay_s
        )
        self._min = min_replicas
        self._lease = LeaseKeeper(app, partial(ask_broker, app, dict(unit), min_replicas))

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        if self._wants.want == 0:
            # A new controller: what runs is what was wanted before.
            self._wants.want = ctx.target_num_replicas
        want = self._wants.update(float(ctx.total_num_requests), time.monotonic())
        self._lease.tell(want)
        granted = self._lease.granted
        if granted is None:
            granted = ctx.target_num_replicas
        return max(self._min, min(want, granted)), {}


def replica_nodes(app: str) -> tuple[str, ...]:
    """Node ids of an app's replicas, those that start and those that drain included.

    A replica holds its devices as a placement group, to which Serve gives the replica's full id as name.
    """
    from ray.util import placement_group_table

    nodes = []
    for group in placement_group_table().values():
        name = str(group.get("name", ""))
        if name.startswith(f"SERVE_REPLICA::{app}#") and group.get("state") == "CREATED":
            nodes.append(next(iter(group["bundles_to_node_id"].values())))
    return tuple(sorted(nodes))
