"""The calls of gateways that a replica answers: what each gains is sent there, and what becomes of it when
the gateway is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from serve_apps.engine.protocol import Delta
from serve_apps.replica.kept_answers import KeptAnswer, KeptAnswers, Listen
from serve_apps.tokens.stream import TokenSender

OnceKey = Mapping[str, Any]
"""What a request says of itself that is to be generated once: `key` and `body`, see `KeptAnswers`."""
Address = Mapping[str, str]
"""A StreamAddress as JSON."""


class GatewayCalls:
    """Those of one replica.

    Args:
        on_orphans: is told the keys of answers that are kept, since their gateway is gone.
    """

    def __init__(self, on_orphans: Callable[[Sequence[str]], object]) -> None:
        self._tasks: dict[asyncio.Task[Any], str] = {}
        """The calls that end with their gateway, and its endpoint."""
        self._kept = KeptAnswers(on_orphans)
        self._sender = TokenSender(self._lost)

    async def connect(self, address: Address) -> None:
        """See `TokenSender.connect`."""
        await self._sender.connect(address)

    def sends_to(self, request: Mapping[str, Any], address: Address) -> Listen:
        """What sends a gateway what its request gains."""
        return partial(self._sender.send, address["endpoint"], request["request_id"])

    @contextlib.contextmanager
    def kept_for(self, address: Address) -> Iterator[None]:
        """Go on with the call of this task while the gateway of this address is there."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = address["endpoint"]
        try:
            yield
        finally:
            del self._tasks[task]

    def find(self, once: OnceKey | None) -> KeptAnswer | None:
        """See `KeptAnswers.find`."""
        return self._kept.find(once)

    async def generate_once(
        self,
        once: OnceKey,
        request: Mapping[str, Any],
        address: Address,
        start: Mapping[str, Any],
        deltas: AsyncIterator[Delta],
        item_of: Callable[[Delta], dict[str, Any]],
    ) -> dict[str, Any]:
        """What `Replica.generate` returns for an answer that goes on when its gateway is gone.

        Args:
            deltas: what the engine generates.
            item_of: what a gateway learns of a delta; the first time it is sent with `start`.
        """
        kept = self._kept.begin(once, address["endpoint"], self._listens(request, address))
        try:
            first = True
            async with aclosing(deltas):  # type: ignore[type-var]
                async for delta in deltas:
                    item = item_of(delta)
                    if first:
                        item["start"], first = start, False
                    kept.add(item)
                    if "finish_reason" in item:
                        break
        except BaseException:
            self._kept.fail(kept)
            raise
        self._kept.finish(kept)
        return {} if request["streamed"] else dict(kept.whole)

    async def join(self, kept: KeptAnswer, request: Mapping[str, Any], address: Address) -> dict[str, Any]:
        """The same for one that another gateway has asked for, which is gone."""
        await self.connect(address)
        endpoint = address["endpoint"]
        await kept.take_over(endpoint, self._listens(request, address))
        with self.kept_for(address):
            try:
                await kept.ended()
            except asyncio.CancelledError:
                if kept.reader == endpoint:  # it was not the gateway that went, but the client
                    kept.end()
                raise
        return {} if request["streamed"] else dict(kept.whole)

    def stop(self) -> None:
        """Send what is left and close."""
        self._sender.stop()

    def _listens(self, request: Mapping[str, Any], address: Address) -> Listen | None:
        """None: it is told at the end."""
        return self.sends_to(request, address) if request["streamed"] else None

    def _lost(self, endpoint: str) -> None:
        """Nobody waits for what a gateway that is gone has asked for, but who may ask again."""
        self._kept.gateway_lost(endpoint)
        for task, other in list(self._tasks.items()):
            if other == endpoint:
                task.cancel()
