"""The ranks of one replica beyond rank 0: actors in the replica's own placement group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_apps.engine.devices import hide_what_is_not_leased
from serve_apps.engine.engine_table import find_engine
from serve_apps.engine.protocol import EngineConfig
from serve_apps.http.log import log_as_json
from serve_apps.spec import AppSpec

logger = logging.getLogger(__name__)


class _Rank:
    """The process of one rank ≥ 1."""

    def follow(self, engine: str, config: EngineConfig, rank: int, host: str, port: int) -> None:
        log_as_json()
        hide_what_is_not_leased(config)
        find_engine(engine).load_follow()(config, rank, host, port)


class RankGroup:
    """Starts ranks 1… of a replica and says at once when one of them ends.

    The actors belong to the process that makes them: Ray ends them with it, however it ends.
    """

    def __init__(self, spec: AppSpec) -> None:
        self._spec = spec
        self._ranks: list[Any] = []
        self._stopping = False
        self.lost: str | None = None
        """Why the group is broken; None while it is whole."""

    def start(self, config: EngineConfig, host: str, port: int, on_lost: Callable[[str], None]) -> None:
        """Start the ranks; `on_lost` is called in the running event loop when one ends by itself."""
        loop = asyncio.get_running_loop()
        group = get_current_placement_group()
        for rank in range(1, self._spec.config.tensor):
            actor = (
                ray.remote(_Rank)
                .options(
                    num_cpus=self._spec.config.cpus,
                    num_gpus=self._spec.config.gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=rank
                    ),
                )
                .remote()
            )
            self._ranks.append(actor)
            ended = actor.follow.remote(self._spec.engine, config, rank, host, port).future()
            ended.add_done_callback(
                lambda future, rank=rank: loop.call_soon_threadsafe(self._ended, rank, future, on_lost)
            )

    def _ended(self, rank: int, future: Any, on_lost: Callable[[str], None]) -> None:
        if self._stopping or self.lost is not None:
            return
        error = future.exception()
        self.lost = f"rank {rank} ended" + (f": {error}" if error is not None else "")
        logger.error("%s: %s", self._spec.name, self.lost)
        on_lost(self.lost)

    def stop(self) -> None:
        """End the ranks; their ends are no failures from here on."""
        self._stopping = True
        for actor in self._ranks:
            ray.kill(actor)
        self._ranks = []
