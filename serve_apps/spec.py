"""What an app is deployed with: plain data that the replicas, the gateway and the status page share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from cluster.config import ServeAppConfig
from cluster.errors import RequestError

DEPLOYMENT = "replica"
"""The Serve deployment inside every app's application."""
GATEWAY = "gateway"
"""The Serve application (and deployment) of the gateway; no app can have this name."""


@dataclass(frozen=True)
class AppSpec:
    """One version of one app. Everything is JSON-able, see `as_json` and `from_json`."""

    name: str
    """The app's name: `model` in OpenAI requests."""
    model: str
    """As the config names it."""
    model_path: str
    """Directory that every node can read; empty when the model is fetched from `storage`."""
    storage: str | None
    """Storage that is not local, whose registry each replica fetches `model_version` from."""
    model_version: str
    """`name@version` of the registry, or the directory's own name."""
    engine: str
    tensor: int
    cpus: int
    gpus: int
    precision: Literal["fp32", "bf16"]
    routing: str
    min_replicas: int
    max_replicas: int
    target_ongoing_requests: float
    upscale_delay_s: float
    downscale_delay_s: float
    max_tokens: int
    queue: int
    batch: int
    batched_tokens: int | None
    context_length: int | None
    kv_cache_bytes: int | None
    block_size: int | None
    prefix_caching: bool
    body_bytes: int
    request_timeout_s: float

    @classmethod
    def from_config(
        cls,
        name: str,
        config: ServeAppConfig,
        *,
        model_path: str,
        model_version: str,
        storage: str | None = None,
    ) -> AppSpec:
        """The spec of an app whose model was found.

        Raises:
            RequestError: the name is taken by the gateway, or a replica would take no device at all.
        """
        if name == GATEWAY:
            raise RequestError(f"serve_apps.{name}: '{GATEWAY}' is the gateway's own name; choose another")
        if config.cpus == 0 and config.gpus == 0:
            raise RequestError(f"serve_apps.{name}: a rank takes cpus: 0 and gpus: 0; give it at least one")
        limits, autoscale, cache = config.limits, config.autoscale, config.kv_cache
        return cls(
            name=name,
            model=config.model,
            model_path=model_path,
            model_version=model_version,
            storage=storage,
            engine=config.engine,
            tensor=config.tensor,
            cpus=config.cpus,
            gpus=config.gpus,
            precision=config.precision,
            routing=config.routing,
            min_replicas=config.replicas.min,
            max_replicas=config.replicas.most,
            target_ongoing_requests=autoscale.target_ongoing_requests,
            upscale_delay_s=autoscale.upscale_delay_s,
            downscale_delay_s=autoscale.downscale_delay_s,
            max_tokens=limits.max_tokens,
            queue=limits.queue,
            batch=limits.batch,
            batched_tokens=limits.batched_tokens,
            context_length=limits.context_length,
            kv_cache_bytes=None if cache.memory_gib is None else int(cache.memory_gib * 2**30),
            block_size=cache.block_size,
            prefix_caching=cache.prefix_caching,
            body_bytes=limits.body_bytes,
            request_timeout_s=limits.request_timeout_s,
        )

    @property
    def holder(self) -> str:
        """The holder of the app's lease."""
        return f"app/{self.name}"

    @property
    def rank_resources(self) -> dict[str, float]:
        """What one rank takes, in Ray's names; what is not taken is left out."""
        return {name: float(n) for name, n in (("CPU", self.cpus), ("GPU", self.gpus)) if n}

    @property
    def replica_resources(self) -> dict[str, float]:
        """What one replica takes, all its ranks together."""
        return {name: n * self.tensor for name, n in self.rank_resources.items()}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> AppSpec:
        return cls(**document)
