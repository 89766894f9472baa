"""An engine that costs nothing: every running request gets one token a step, and steps follow one another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from serve_apps.engine.protocol import Delta, EngineConfig, SamplingParams, Statistics


class CostlessEngine:
    """Implements serve_apps.engine.protocol.Engine without a model."""

    def __init__(self, config: EngineConfig, master_addr: str, master_port: int) -> None:
        self.context_length = config.context_length or 4096
        self._queues: dict[str, tuple[asyncio.Queue[Delta], list[int]]] = {}
        self._woken = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._steps = asyncio.create_task(self._step_forever())

    async def _step_forever(self) -> None:
        while True:
            await self._woken.wait()
            for queue, left in list(self._queues.values()):
                left[0] -= 1
                if left[0] >= 0:
                    queue.put_nowait(Delta(" token", (7,), (), None if left[0] else "length"))
            # Whoever reads does so before the next step.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[Delta]:
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._queues[request_id] = (queue, [sampling.max_tokens])
        self._woken.set()
        try:
            while True:
                delta = await queue.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            del self._queues[request_id]
            if not self._queues:
                self._woken.clear()

    async def embed(self, request_id: str, prompt_ids: Sequence[int]) -> list[float]:
        return [0.0]

    async def load_weights(self, model_path: str) -> None:
        pass

    async def abort(self, request_id: str) -> None:
        pass

    def chat(self, tools: str | None, reasoning: str | None) -> None:
        """Left to the replica; see `Engine.chat`."""

    def statistics(self) -> Statistics:
        return Statistics(running=len(self._queues))

    def check(self) -> None:
        pass

    async def stop(self) -> None:
        if self._steps is not None:
            self._steps.cancel()


def follow(config: EngineConfig, rank: int, master_addr: str, master_port: int) -> None:
    """There are no other ranks."""
