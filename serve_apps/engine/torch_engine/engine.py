"""The torch engine as a replica sees it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from serve_apps.engine.memory_check import check_node, memory_of
from serve_apps.engine.protocol import (
    AnswerError,
    Delta,
    EngineConfig,
    EngineError,
    PromptError,
    SamplingParams,
    Statistics,
    WeightsError,
)
from serve_apps.engine.request_checks import check_prompt, check_sampling
from serve_apps.engine.structures import COMPILERS
from serve_apps.engine.torch_engine.loop import EngineLoop, Gain
from serve_apps.engine.torch_engine.model import read_facts, read_tokenizer
from serve_apps.engine.torch_engine.ranks import device_of
from serve_apps.engine.torch_engine.torch_options import TorchOptions

_Gains = asyncio.Queue["Gain | EngineError"]


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
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="schema")
        self._steps: EngineLoop | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, _Gains] = {}
        self._failure: EngineError | None = None
        self._ready = asyncio.Event()
        """Set when the model is loaded, or will never be."""
        self._gone = asyncio.Event()
        """Set when the engine's thread has ended."""
        self._stopped = False

    async def start(self) -> None:
        """Load the model on all ranks; return when requests can be taken.

        Raises:
            EngineError: the model cannot be loaded or run (it does not fit in memory, say), or the ranks did
                not meet.
        """
        self._event_loop = asyncio.get_running_loop()
        options = TorchOptions.of(self.config)
        facts = await asyncio.to_thread(read_facts, self.config, self.config.model_path)
        tokenizer = await asyncio.to_thread(read_tokenizer, self.config.model_path)
        if device_of(0, self.config.device).type == "cpu":
            # Before the ranks meet: none of them has loaded anything yet, and all of them are on this node.
            check_node(self.config, await asyncio.to_thread(memory_of, self.config, self.config.model_path))
        self.context_length = facts.context_length
        self._vocab_size = facts.vocab_size
        self._steps = EngineLoop(self.config, options, facts, tokenizer, self._deliver)
        thread = self._executor.submit(self._steps.run, *self._master, lambda: self._call(self._ready.set))
        thread.add_done_callback(lambda thread: self._call(self._ended, thread))
        await self._ready.wait()
        self.check()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[Delta]:
        """Run one request; see `Engine.generate`."""
        check_sampling(sampling, self._vocab_size)
        self._check_prompt(prompt_ids, sampling.max_tokens)
        steps = self._running()
        with self._queue(request_id) as queue:
            structure = None
            if sampling.structure is not None:
                # A large one, or the first, takes its time.
                loop = asyncio.get_running_loop()
                structure = await loop.run_in_executor(self._compilers, steps.structure, sampling)
            steps.add(request_id, tuple(prompt_ids), sampling, priority, structure, cache_salt)
            while True:
                delta = await self._next(queue)
                assert isinstance(delta, Delta)
                yield delta
                if delta.finish_reason is not None:
                    return

    async def embed(self, request_id: str, prompt_ids: Sequence[int]) -> list[float]:
        """The mean of the prompt's last hidden states; see `Engine.embed`."""
        self._check_prompt(prompt_ids, 0)
        steps = self._running()
        with self._queue(request_id) as queue:
            steps.embed(request_id, tuple(prompt_ids))
            gain = await self._next(queue)
            if isinstance(gain, Delta):
                raise EngineError("the request was aborted")
            assert isinstance(gain, list)
            return gain

    async def load_weights(self, model_path: str) -> None:
        """Go on with the weights of another version of the model; see `Engine.load_weights`."""
        await asyncio.wrap_future(self._running().load(model_path))

    async def park(self) -> bool:
        """Give device and KV cache back; see `Engine.park`."""
        await self._change(self._running().park())
        return True

    async def wake(self) -> None:
        """Go on as before; see `Engine.wake`."""
        await self._change(self._running().wake())

    async def _change(self, done: Future[None]) -> None:
        try:
            await asyncio.wrap_future(done)
        except WeightsError as error:  # it has stopped meanwhile
            self.check()
            raise EngineError(str(error)) from error

    async def abort(self, request_id: str) -> None:
        """End a request now; its iterator ends with a delta whose finish reason is "abort"."""
        if self._steps is None:
            return
        last = self._steps.abort(request_id)
        if last is not None:
            self._hand_out([(request_id, last)])

    def chat(self, tools: str | None, reasoning: str | None) -> None:
        """Left to the replica; see `Engine.chat`."""

    def statistics(self) -> Statistics:
        if self._steps is None or self._failure is not None or not self._ready.is_set():
            return Statistics()
        return self._steps.statistics()

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
        self._compilers.shutdown(wait=False)

    @contextmanager
    def _queue(self, request_id: str) -> Iterator[_Gains]:
        """Where a request's gains arrive; leaving the context ends it.

        Raises:
            PromptError: the request id is in use.
        """
        if request_id in self._queues:
            raise PromptError(f"request {request_id} is already in the engine")
        queue = self._queues[request_id] = asyncio.Queue()
        try:
            yield queue
        finally:
            # Nothing is left of it when it ended by itself.
            if self._steps is not None:
                self._steps.abort(request_id)
            del self._queues[request_id]

    async def _next(self, queue: _Gains) -> Gain:
        gain = await queue.get()
        if isinstance(gain, EngineError):
            raise EngineError(str(gain)) from gain
        if isinstance(gain, AnswerError):
            raise gain
        return gain

    def _running(self) -> EngineLoop:
        self.check()
        if self._steps is None or self._stopped or not self._ready.is_set():
            raise EngineError("the engine is not running")
        return self._steps

    def _check_prompt(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        check_prompt(prompt_ids, max_tokens, context_length=self.context_length, vocab_size=self._vocab_size)

    def _deliver(self, gains: list[tuple[str, Gain]]) -> None:
        """Called in the engine's thread, once a step: one wake-up of the event loop for all requests."""
        self._call(self._hand_out, gains)

    def _call(self, function: object, *arguments: object) -> None:
        assert self._event_loop is not None
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]

    def _hand_out(self, gains: list[tuple[str, Gain]]) -> None:
        for request_id, gain in gains:
            queue = self._queues.get(request_id)
            if queue is not None:
                queue.put_nowait(gain)

    def _ended(self, thread: Future[None]) -> None:
        """The engine's thread is gone: after `stop`, or because it failed, which ends every request."""
        error = thread.exception()
        if error is not None:
            failure = EngineError(str(error) if isinstance(error, EngineError) else _where_and_what(error))
            failure.__cause__ = error
            self._failure = failure
            for queue in self._queues.values():
                queue.put_nowait(failure)
        self._ready.set()
        self._gone.set()


def _where_and_what(error: BaseException) -> str:
    *_, frame = traceback.extract_tb(error.__traceback__)
    return f"a step failed in {frame.filename}, line {frame.lineno}: {error!r}"
