"""Whether a model fits in the accelerators that the config names."""

from __future__ import annotations

from cluster.config.checks.ground import NODES, Ground, MistakeReport
from cluster.config.checks.served_model import ServedModel
from cluster.config.models.model_memory import ModelMemory, cache_bytes, show_gib, weight_bytes
from cluster.config.sections.cluster import NodeConfig
from cluster.config.sections.serve import ServeAppConfig
from cluster.planning.hardware import CATALOGUE, Accelerator

OTHER_WEIGHTS = frozenset(
    (
        "quantization",
        "cpu_offload_gb",
        "offload_backend",
        "dtype",
        "hf_overrides",
        "load_format",
        "kv_cache_dtype",
    )
)
"""Arguments of vLLM after which its weights take another room than their number says."""

_GIB_PER_GB = 2**30 / 1e9


def check_device_room(app: ServeAppConfig, model: ServedModel, ground: Ground, report: MistakeReport) -> None:
    """Report it when a rank's weights, with one request's KV cache, are larger than any device's memory.

    Nothing is said where a node that could hold a replica has devices of an unknown kind.
    """
    hosts = [
        kind
        for kind in ground.kinds
        if app.gpus and kind.gpus >= app.ranks * app.gpus and kind.cpus >= app.ranks * app.cpus
    ]
    devices = [_accelerator(kind) for kind in hosts]
    known = [device for device in devices if device is not None]
    memory = memory_of(app, model)
    if not known or len(known) < len(devices) or memory is None:
        return
    best = max(known, key=_room)
    need = memory.rank_bytes(app.ranks)
    if need <= _room(best):
        return
    advice = "more ranks (tensor), " + ("" if app.precision == "bf16" else "precision: bf16, ")
    message = (
        f"{model.words} needs {show_gib(need)} at the least on {_ranks(app)}"
        f" ({memory.describe(app.precision, app.ranks)}), but {best.name} has {show_gib(_room(best))}:"
        f" take {advice}a shorter limits.context_length, or nodes with larger devices"
    )
    uses: tuple[str, ...] = ("pipeline", "precision", "gpus", "cpus", "accelerator")
    uses += ("engine", "engine_kwargs", "limits", "kv_cache", "model")
    report("tensor", app.tensor, message, *uses, NODES, *model.uses)


def memory_of(app: ServeAppConfig, model: ServedModel) -> ModelMemory | None:
    """What the model takes on all ranks of a replica at the least; None where nothing tells it."""
    if app.engine == "vllm" and OTHER_WEIGHTS & app.engine_kwargs.keys():
        return None
    weights = weight_bytes(model.source, app.precision)
    if weights is None:
        return None
    if app.kv_cache.memory_gib is not None:
        return ModelMemory(weights, int(app.kv_cache.memory_gib * 2**30) * app.ranks)
    if app.engine == "vllm":
        return ModelMemory(weights, 0)  # what one token takes there depends on the model's attention
    return ModelMemory(weights, cache_bytes(model.sizes, app.limits.context_length, app.precision))


def _accelerator(kind: NodeConfig) -> Accelerator | None:
    return next((entry for entry in CATALOGUE.values() if entry.name == kind.accelerator), None)


def _room(device: Accelerator) -> int:
    """Its memory in bytes: what data sheets call a GB is a GiB, or a little less."""
    return int(device.memory_bytes * _GIB_PER_GB)


def _ranks(app: ServeAppConfig) -> str:
    return "its one rank" if app.ranks == 1 else f"each of its {app.ranks} ranks"
