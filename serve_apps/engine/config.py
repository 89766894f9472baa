"""What starting an engine takes, from an app's spec: its config and the devices of its ranks."""

from __future__ import annotations

import math

from serve_apps.engine.engine_table import find_engine
from serve_apps.engine.protocol import EngineConfig
from serve_apps.spec import AppSpec


def engine_config(
    spec: AppSpec,
    model_path: str,
    *,
    max_waiting: int | None = None,
    watched: bool = True,
    parks: bool = False,
) -> EngineConfig:
    """The config of all ranks of one replica.

    Args:
        model_path: a directory on the replica's node, see `models.model_directory`.
        max_waiting: requests that may wait beside the batch. Default: as many as the batch has.
        watched: somebody sees answers come, which prompts must not hold up for long.
        parks: it may be parked.
    """
    config, limits, cache = spec.config, spec.config.limits, spec.config.kv_cache
    return EngineConfig(
        model_path=model_path,
        tensor=config.tensor,
        pipeline=config.pipeline,
        precision=config.precision,
        max_batch=limits.batch,
        max_waiting=limits.batch if max_waiting is None else max_waiting,
        batched_tokens=limits.batched_tokens,
        prefill_ms=limits.prefill_ms if watched or config.engine != "torch" else math.inf,
        context_length=limits.context_length,
        kv_cache_bytes=None if cache.memory_gib is None else int(cache.memory_gib * 2**30),
        block_size=cache.block_size,
        prefix_caching=cache.prefix_caching,
        device="cuda" if config.gpus else "cpu",
        threads=max(1, config.cpus),
        parks=parks,
        extra=dict(config.engine_kwargs),
    )


def replica_bundles(spec: AppSpec) -> list[dict[str, float]]:
    """The bundles of one replica's placement group, in Ray's names; rank 0 is in the first."""
    if find_engine(spec.engine).has_own_ranks:
        # The process of rank 0 has the devices of all, and starts the others on them.
        return [spec.replica_resources]
    return [spec.rank_resources] * spec.config.ranks
