"""The torch engine as a replica sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from transformers import AutoTokenizer

from serve_apps.engine.protocol import (
    Delta,
    EngineConfig,
    EngineError,
    PromptError,
    SamplingParams,
    Statistics,
)
from serve_apps.engine.torch_engine.loop import StepLoop
from serve_apps.engine.torch_engine.model import read_facts
from serve_apps.engine.torch_engine.options import TorchOptions

_Queue = asyncio.Queue["Delta | EngineError"]


class TorchEngine:
    """Rank 0 of a replica; implements `serve_apps.engine.protocol.Engine`.

    With `config.tensor` > 1, `follow` must run in as many other processes less one, with the same arguments.

        engine = TorchEngine(EngineConfig("./model"))
        await engine.start()
        async for delta in engine.generate("1", prompt_ids, SamplingParams(temperature=0)):
            print(delta.text, end="")

    Args:
        config: what to run; its `extra` holds the fields of `TorchOptions`.
        master_addr, master_port: where the ranks meet; needed with tensor > 1. Rank 0 listens there.
    """

    def __init__(
        self, config: EngineConfig, master_addr: str | None = None, master_port: int | None = None
    ) -> None:
        if config.tensor > 1 and (master_addr is None or master_port is None):
            raise EngineError(
                "tensor is above 1, so the ranks need a master_addr and a master_port to meet at"
            )
        self.config = config
        self.context_length = config.context_length or 0
        """Most tokens of prompt and answer together; known after `start` when the config does not say."""
        self._master = (master_addr, master_port)
        self._vocab_size = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch-engine")
        self._steps: StepLoop | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, _Queue] = {}
        self._failure: EngineError | None = None
        self._ready = asyncio.Event()
        """Set when the model is loaded, or will never be."""
        self._gone = asyncio.Event()
        """Set when the engine's thread has ended."""
        self._stopped = False

    async def start(self) -> None:
        """Load the model on all ranks; return when requests can be taken.

        Raises:
            EngineError: the model cannot be loaded or run, or the ranks did not meet.
        """
        self._event_loop = asyncio.get_running_loop()
        options = TorchOptions.of(self.config)
        facts = await asyncio.to_thread(read_facts, self.config)
        try:
            tokenizer = await asyncio.to_thread(
                AutoTokenizer.from_pretrained, self.config.model_path, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise EngineError(f"{self.config.model_path} has no tokenizer: {error}") from error
        self.context_length = facts.context_length
        self._vocab_size = facts.vocab_size
        self._steps = StepLoop(self.config, options, facts, tokenizer, self._deliver)
        thread = self._executor.submit(self._steps.run, *self._master, lambda: self._call(self._ready.set))
        thread.add_done_callback(lambda thread: self._call(self._ended, thread))
        await self._ready.wait()
        self.check()

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams
    ) -> AsyncIterator[Delta]:
        """Run one request; see `Engine.generate`."""
        self._validate(prompt_ids, sampling)
        steps = self._running()
        queue: _Queue = asyncio.Queue()
        try:
            steps.add(request_id, tuple(prompt_ids), sampling)
        except ValueError as error:
            raise PromptError(str(error)) from error
        self._queues[request_id] = queue
        try:
            while True:
                delta = await queue.get()
                if isinstance(delta, EngineError):
                    raise EngineError(str(delta)) from delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            # Nothing is left of it when it ended by itself.
            steps.abort(request_id)
            self._queues.pop(request_id, None)

    async def abort(self, request_id: str) -> None:
        """End a request now; its iterator ends with a delta whose finish reason is "abort"."""
        if self._steps is None:
            return
        last = self._steps.abort(request_id)
        if last is not None:
            self._hand_out([(request_id, last)])

    def statistics(self) -> Statistics:
        return Statistics() if self._steps is None else self._steps.statistics()

    def check(self) -> None:
        """Raise EngineError when the engine cannot go on."""
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure

    async def stop(self) -> None:
        """End all requests with "abort", the other ranks with a message, and free the model."""
        self._stopped = True
        for request_id in list(self._queues):
            await self.abort(request_id)
        if self._steps is not None:
            self._steps.stop()
            await self._gone.wait()
            self._steps = None
        self._executor.shutdown(wait=False)

    def _running(self) -> StepLoop:
        self.check()
        if self._steps is None or self._stopped:
            raise EngineError("the engine is not running")
        return self._steps

    def _validate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        if not prompt_ids:
            raise PromptError("the prompt is empty; it needs at least one token")
        if sampling.max_tokens < 1:
            raise PromptError(f"max_tokens is {sampling.max_tokens}; it must be at least 1")
        total = len(prompt_ids) + sampling.max_tokens
        if total > self.context_length:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens and asks for up to {sampling.max_tokens} more, "
                f"together {total}; this model takes at most {self.context_length}"
            )
        if not (min(prompt_ids) >= 0 and max(prompt_ids) < self._vocab_size):
            wrong = next(token for token in prompt_ids if not 0 <= token < self._vocab_size)
            raise PromptError(
                f"the prompt holds the token id {wrong}; this model's are 0 to {self._vocab_size - 1}"
            )
        if not sampling.temperature >= 0:
            raise PromptError(f"temperature is {sampling.temperature}; it must be 0 or more")
        if not 0 < sampling.top_p <= 1:
            raise PromptError(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")
        if sampling.top_k < 0:
            raise PromptError(f"top_k is {sampling.top_k}; it must be 0 (every token) or more")
        if sampling.logprobs is not None and sampling.logprobs < 0:
            raise PromptError(f"logprobs is {sampling.logprobs}; it must be 0 or more")

    def _deliver(self, deltas: list[tuple[str, Delta]]) -> None:
        """Called in the engine's thread, once a step: one wake-up of the event loop for all requests."""
        self._call(self._hand_out, deltas)

    def _call(self, function: object, *arguments: object) -> None:
        assert self._event_loop is not None
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]

    def _hand_out(self, deltas: list[tuple[str, Delta]]) -> None:
        for request_id, delta in deltas:
            queue = self._queues.get(request_id)
            if queue is not None:
                queue.put_nowait(delta)

    def _ended(self, thread: Future[None]) -> None:
        """The engine's thread is gone: after `stop`, or because it failed, which ends every request."""
        error = thread.exception()
        if error is not None:
            said = str(error) if isinstance(error, EngineError) else f"a step failed: {error!r}"
            failure = EngineError(said)
            failure.__cause__ = error
            self._failure = failure
            for queue in self._queues.values():
                queue.put_nowait(failure)
        self._ready.set()
        self._gone.set()
