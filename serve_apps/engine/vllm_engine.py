"""vLLM as an engine: its own ranks, its own batching; installed beside Shoal with the extra `vllm`.

Source: vLLM's `AsyncLLM` (https://docs.vllm.ai), which runs the engine in processes of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from serve_apps.engine.answer import Answer
from serve_apps.engine.process_family import ProcessFamily
from serve_apps.engine.protocol import (
    AnswerError,
    Delta,
    EngineConfig,
    EngineError,
    PromptError,
    QueueFullError,
    SamplingParams,
    Statistics,
    UnsupportedError,
    WeightsError,
)
from serve_apps.engine.request_checks import check_prompt, check_sampling
from serve_apps.engine.structures import COMPILERS, CompiledStructure, compiled, is_whole
from serve_apps.engine.titles import show_parked
from serve_apps.engine.token_pieces import TokenPieces
from serve_apps.engine.vllm_chat import VllmChat
from serve_apps.engine.vllm_log import root_cause
from serve_apps.engine.vllm_requests import delta_of, end_of, not_held, vllm_params
from serve_apps.engine.vllm_start import start_vllm
from serve_apps.engine.vllm_statistics import VllmStatistics
from serve_apps.engine.weight_files import check_same_shapes

logger = logging.getLogger(__name__)

_STEP_TIMEOUT_S = 60.0
_LOAD_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 1.0
_LEARN_EVERY_S = 30.0
_ABORT_TIMEOUT_S = 5.0

Result = TypeVar("Result")

_Arriving = asyncio.Queue["Any | Exception | None"]
"""vLLM's outputs of one request; None ends them."""


class VllmEngine:
    """Implements `serve_apps.engine.protocol.Engine`; all ranks are vLLM's own processes.

    Args:
        config: what to run; its `extra` holds arguments of vLLM's `AsyncEngineArgs`, which go before those
            that follow from the other fields, and `step_timeout_s` (60): how long requests may be in the
            engine without a step before it counts as broken.
    """

    def __init__(self, config: EngineConfig, master_addr: str = "", master_port: int = 0) -> None:
        self.config = config
        self.context_length = config.context_length or 0
        self._extra = dict(config.extra)
        self._step_timeout_s = float(self._extra.pop("step_timeout_s", _STEP_TIMEOUT_S))
        self._model_path = config.model_path
        self._vllm: Any = None
        self._tokenizer: Any = None
        self._piece: Callable[[int], bytes] = lambda token_id: b""
        self._family: ProcessFamily | None = None
        self._vocab_size = 0
        self._seen = VllmStatistics()
        self._failure: str | None = None
        self._broken = asyncio.Event()
        """Set with `_failure`."""
        self._active: dict[str, _Arriving] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        """Set while requests may go to vLLM; not while weights change."""
        self._changing = asyncio.Lock()
        self._digests: list[int] = []
        """Of the ranks' weights, when it was parked."""
        self._watch: asyncio.Task[None] | None = None
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="schema")

    async def start(self) -> None:
        """Start vLLM and load the model; see `Engine.start`. Nothing is left of it when that fails."""
        self._family = ProcessFamily()
        try:
            self._vllm = start_vllm(self.config, self._extra, self._seen, self._family)
            model = self._vllm.vllm_config.model_config
            self.context_length = model.max_model_len
            self._vocab_size = model.get_vocab_size()
            self._tokenizer = self._vllm.get_tokenizer()
            pieces = TokenPieces(self._tokenizer)
            self._piece = lambda token_id: pieces.of(token_id)[1]
            await asyncio.to_thread(pieces.prepare)
            await self._warm_up()
            await self._measure_cache()
            await asyncio.to_thread(self._family.look)
        except BaseException as error:
            self._failure = f"vLLM could not start: {error}"
            await self.stop()
            raise
        self._open.set()
        self._watch = asyncio.create_task(self._look_after())

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[Delta]:
        """Run one request; see `Engine.generate`."""
        # vLLM hangs on some of what these refuse: a bias for a token that there is not, say.
        check_sampling(sampling, self._vocab_size)
        check_prompt(
            prompt_ids,
            max(1, sampling.max_tokens),  # it generates one in any case
            context_length=self.context_length,
            vocab_size=self._vocab_size,
        )
        structure: CompiledStructure | None = None
        if sampling.structure is not None:
            # vLLM leaves a request alone for ever whose structure it cannot compile.
            structure = await self._in_compiler(compiled, *sampling.structure)
            if sampling.json_schema is not None:
                sampling = replace(sampling, json_schema=structure.text)
        params = vllm_params(sampling)
        text, first = "", True
        async with self._place(request_id) as queue:
            answer = Answer(self._tokenizer, prompt_ids, sampling, self._piece)
            prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
            if cache_salt:
                prompt["cache_salt"] = cache_salt
            # Where the answer begins with reasoning, vLLM's own parser says where that ends.
            ended = None if structure is None else sampling.reasoning is None
            outputs = self._vllm.generate(
                prompt, params, request_id, priority=priority, reasoning_ended=ended
            )
            reader = asyncio.create_task(self._read(outputs, queue))
            try:
                while (output := await queue.get()) is not None:
                    if isinstance(output, Exception):
                        raise output
                    delta = delta_of(output, sampling, answer, first=first)
                    first = False
                    if structure is not None:
                        text = self._behind_reasoning(text + delta.text, delta, sampling)
                        if (end := end_of(delta)) is not None:
                            await self._check_whole(sampling, structure, text, end)
                    yield delta
                    if delta.stop_string is not None:
                        return  # vLLM knows nothing of it
            finally:
                # vLLM aborts a request whose reader is cancelled.
                reader.cancel()
                await asyncio.wait([reader])

    def _behind_reasoning(self, text: str, delta: Delta, sampling: SamplingParams) -> str:
        """The text that the structure holds, where that is all or begins in a delta."""
        end = None if sampling.reasoning is None else sampling.reasoning[1]
        if end is None or end not in delta.token_ids:
            return text
        return text.rpartition(str(self._tokenizer.decode([end])))[2]

    async def _in_compiler(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._compilers, function, *arguments)

    async def _check_whole(
        self, sampling: SamplingParams, structure: CompiledStructure, text: str, end: int
    ) -> None:
        """Check an answer that ends by itself: a grammar that has given up lets nothing but the end come.

        Raises:
            AnswerError: it is not what its structure asks for.
        """
        if sampling.include_stop and not sampling.skip_special_tokens:
            text = text.removesuffix(str(self._tokenizer.decode([end])))
        if not await self._in_compiler(is_whole, structure, text):
            assert sampling.structure is not None
            raise not_held(sampling.structure[0])

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
                await self._ask("reset_prefix_cache")
                await self._reload(model_path)
                self._model_path = model_path
            finally:
                self._open.set()

    async def park(self) -> bool:
        """Give device and KV cache back, by vLLM's sleep mode; see `Engine.park`."""
        own = "worker_extension_cls" not in self._extra
        if not (own and self._vllm is not None and self._vllm.vllm_config.model_config.enable_sleep_mode):
            return False
        self._open.clear()
        await self._idle.wait()
        self._digests = await self._ask("collective_rpc", "shoal_digest")
        await self._ask("sleep", 1)
        show_parked(True)
        return True

    async def wake(self) -> None:
        """Go on as before; see `Engine.wake`."""
        await self._ask("wake_up")
        if await self._ask("collective_rpc", "shoal_digest") != self._digests:
            self._break("the weights that were parked are not what they were")
            raise EngineError(str(self._failure))
        show_parked(False)
        self._open.set()

    def chat(self, tools: str | None, reasoning: str | None) -> VllmChat:
        """vLLM's own serving layer; see `Engine.chat`."""
        return VllmChat(self._vllm, tools, reasoning)

    def statistics(self) -> Statistics:
        """A look into vLLM, as of its last step."""
        return self._seen.as_statistics()

    def check(self) -> None:
        """Raise EngineError when vLLM has died, or makes no steps while it has requests."""
        if self._failure is None and self._vllm is not None and self._vllm.errored:
            cause = None if self._family is None else root_cause(self._family.directory)
            self._break(f"vLLM has died: {cause or self._vllm.dead_error}")
        if self._failure is not None:
            raise EngineError(self._failure)

    async def stop(self) -> None:
        """End all requests, and vLLM with all its processes, whatever state they are in."""
        if self._watch is not None:
            self._watch.cancel()
        self._compilers.shutdown(wait=False)
        vllm, self._vllm = self._vllm, None
        family, self._family = self._family, None
        try:
            if vllm is not None and self._failure is None:
                with suppress(Exception):
                    async with asyncio.timeout(_ABORT_TIMEOUT_S):
                        await vllm.abort(list(self._active), internal=False)
            elif family is not None:
                # Nothing of it need be asked to end, and what hangs would not.
                await asyncio.to_thread(family.kill)
            if vllm is not None:
                await asyncio.to_thread(vllm.shutdown)
        finally:
            if family is not None:
                await asyncio.to_thread(family.end)

    @asynccontextmanager
    async def _place(self, request_id: str) -> AsyncIterator[_Arriving]:
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
        self.check()
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

    async def _read(self, outputs: Any, queue: _Arriving) -> None:
        """Hand on vLLM's outputs of one request, and how they end."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            async for output in outputs:
                queue.put_nowait(output)
            queue.put_nowait(None)
        except EngineDeadError as error:
            queue.put_nowait(EngineError(f"vLLM failed: {error}"))
        except EngineGenerateError as error:
            # vLLM itself lives on, and so do the others' answers.
            why = f"vLLM failed: {error.__cause__ or error}"
            lives = self._vllm is not None and not self._vllm.errored
            queue.put_nowait(AnswerError(why, own_fault=False) if lives else EngineError(why))
        except (ValueError, VLLMClientError) as error:
            # What vLLM itself finds wrong with a request.
            queue.put_nowait(PromptError(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits for the request must hear of it
            queue.put_nowait(AnswerError(f"vLLM failed: {error!r}", own_fault=False))

    async def _warm_up(self) -> None:
        """Run what compiles or allocates when it is first used; no request should wait for that."""
        for number, params in enumerate(
            (
                SamplingParams(max_tokens=2, ignore_eos=True),
                SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1, seed=1),
            )
        ):
            outputs = self._vllm.generate({"prompt_token_ids": [0]}, vllm_params(params), f"warm-up {number}")
            try:
                async for _ in outputs:
                    pass
            except Exception as error:  # whatever went wrong in any part of vLLM
                cause = None if self._family is None else root_cause(self._family.directory)
                raise EngineError(f"vLLM could not run a step: {cause or error}") from error

    async def _measure_cache(self) -> None:
        """Learn how large the KV cache has become."""
        cache = self._vllm.vllm_config.cache_config
        # Blocks hold tokens of some layers only where the layers differ; vLLM has reckoned with that here.
        self._seen.cache_tokens = cache.kv_cache_size_tokens or 0
        if "worker_extension_cls" in self._extra:
            self._seen.cache_bytes = cache.kv_cache_memory_bytes or 0  # its workers know nothing of ours
        else:
            self._seen.cache_bytes = max(await self._ask("collective_rpc", "shoal_cache_bytes"))

    async def _ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """A call of vLLM's that an engine that dies or hangs does not hold up.

        Raises:
            EngineError: it died, or did not answer in 600 s.
        """
        self.check()
        if self._vllm is None:
            raise EngineError("the engine is not running")
        answer = asyncio.ensure_future(getattr(self._vllm, method)(*arguments, **named))
        broken = asyncio.ensure_future(self._broken.wait())
        try:
            await asyncio.wait((answer, broken), timeout=_LOAD_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if not broken.done():
                self._break(f"vLLM did not answer {method} within {_LOAD_TIMEOUT_S:.0f} s")
            raise EngineError(str(self._failure))
        finally:
            answer.cancel()
            broken.cancel()

    async def _reload(self, model_path: str) -> None:
        async def load(path: str) -> None:
            await self._ask("collective_rpc", "reload_weights", kwargs={"weights_path": path})

        try:
            await load(model_path)
        except EngineError:
            raise
        except Exception as error:
            # Part of it may be there already: the old ones are loaded again, or the engine is of no use.
            try:
                await load(self._model_path)
            except Exception as again:
                self._break(f"neither the new weights nor the old could be loaded: {again}")
                raise EngineError(str(self._failure)) from again
            raise WeightsError(f"the weights of {model_path} cannot be loaded: {error}") from error

    async def _look_after(self) -> None:
        """Find out that vLLM has died, or hangs: requests are in it, and no step comes."""
        learned = time.monotonic()
        while self._failure is None:
            await asyncio.sleep(_LOOK_EVERY_S)
            silent_s = time.monotonic() - self._seen.at
            if self._active and silent_s > self._step_timeout_s:
                self._break(
                    f"vLLM made no step for {silent_s:.0f} s while it had {len(self._active)} requests"
                )
            with suppress(EngineError):
                self.check()
            if self._family is not None and time.monotonic() - learned > _LEARN_EVERY_S:
                learned = time.monotonic()
                await asyncio.to_thread(self._family.look)

    def _break(self, why: str) -> None:
        logger.error("%s", why)
        self._failure = why
        self._broken.set()
        self._idle.set()
        for queue in self._active.values():
            queue.put_nowait(EngineError(why))
