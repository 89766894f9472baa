"""What vLLM's workers are asked that they do not tell by themselves; its processes load this."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

EXTENSION = f"{__name__}.WorkerExtension"
"""vLLM's `worker_extension_cls`."""


class WorkerExtension:
    """Becomes a base of vLLM's worker class."""

    model_runner: Any

    def shoal_cache_bytes(self) -> int:
        """Memory that the KV cache takes on this rank, in bytes; layers may share some of it."""
        storages = (tensor.untyped_storage() for tensor in _tensors(self.model_runner.kv_caches))
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def shoal_digest(self) -> int:
        """A number that says which bits the weights of this rank have."""
        from serve_apps.engine.torch_engine.parked_weights import digest

        return digest(self.model_runner.get_model())


def _tensors(caches: Iterable[Any]) -> Iterator[Any]:
    """One a layer, or several where a layer's cache has parts."""
    for cache in caches:
        if isinstance(cache, list | tuple):
            yield from _tensors(cache)
        elif cache is not None:
            yield cache
