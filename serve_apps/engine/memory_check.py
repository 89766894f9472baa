"""Refuses a model that does not fit in the memory there is, before a byte of it is loaded."""

from __future__ import annotations

from pathlib import Path

from cluster.config.models.model_memory import ModelMemory, cache_bytes, show_gib, weight_bytes
from cluster.config.models.model_sizes import ModelDirectoryError, read_sizes
from serve_apps.engine.node_memory import available_bytes
from serve_apps.engine.protocol import EngineConfig, EngineError


def memory_of(config: EngineConfig, model_path: str, *, with_context: bool = True) -> ModelMemory | None:
    """What the model takes on all ranks at the least; None where its files do not tell.

    Args:
        with_context: whether the keys and values of one request of the longest context count where the
            config gives the KV cache no memory of its own.
    """
    directory = Path(model_path)
    weights = weight_bytes(directory, config.precision)
    if weights is None:
        return None
    if config.kv_cache_bytes is not None:
        return ModelMemory(weights, config.kv_cache_bytes * config.tensor * config.pipeline)
    try:
        sizes = read_sizes(directory)
    except ModelDirectoryError:
        return ModelMemory(weights, 0)
    cache = cache_bytes(sizes, config.context_length, config.precision) if with_context else 0
    return ModelMemory(weights, cache)


def check_node(config: EngineConfig, memory: ModelMemory | None, available: int | None = None) -> None:
    """Whether a node's memory holds all ranks of a replica that computes on CPUs.

    Args:
        memory: what the replica takes, see `memory_of`.
        available: bytes that the node has left. Default: what this machine has.

    Raises:
        EngineError: it does not.
    """
    if memory is None:
        return
    room = available_bytes() if available is None else available
    if memory.total_bytes <= room:
        return
    ranks = config.tensor * config.pipeline
    who = "a replica" if ranks == 1 else f"a replica of {ranks} ranks, all of them on this node,"
    raise EngineError(
        f"the model {config.model_path} does not fit in this node's memory: {who} needs"
        f" {show_gib(memory.total_bytes)} at the least ({memory.describe(config.precision)}), and"
        f" {show_gib(room)} are available; {_advice(config)}serve it on a node with more memory"
    )


def check_device(config: EngineConfig, memory: ModelMemory | None, free: int, device: str) -> None:
    """Whether an accelerator holds one rank.

    Args:
        memory: what the whole replica takes, see `memory_of`.
        free: bytes that the device has left.
        device: its name, for the message.

    Raises:
        EngineError: it does not.
    """
    if memory is None:
        return
    ranks = config.tensor * config.pipeline
    need = memory.rank_bytes(ranks)
    if need <= free:
        return
    each = "its one rank" if ranks == 1 else f"each of its {ranks} ranks"
    raise EngineError(
        f"the model {config.model_path} does not fit in the memory of {device}: {each} needs"
        f" {show_gib(need)} at the least ({memory.describe(config.precision, ranks)}), and"
        f" {show_gib(free)} are free; {_advice(config)}set a larger tensor, or serve it on devices with more"
        " memory"
    )


def _advice(config: EngineConfig) -> str:
    advice = "" if config.precision == "bf16" else "use precision: bf16, "
    return advice + (
        "give the KV cache less memory, " if config.kv_cache_bytes else "set a shorter context_length, "
    )
