"""Several deltas of a stream as one message: a token alone does not pay for a message through Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from serve_apps.engine.protocol import Delta


def merge(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas as one."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
    )


class Coalescer:
    """Reads deltas as fast as they come and gives them on in bundles.

    The first delta goes at once, and so does the last; between them a bundle goes when `interval()` seconds
    have passed since the one before. Closing the iterator closes the source, which ends the request in the
    engine.
    """

    def __init__(self, source: AsyncIterator[Delta], interval_s: Callable[[], float]) -> None:
        self._source = source
        self._interval_s = interval_s
        self._pending: list[Delta] = []
        self._error: BaseException | None = None
        self._ended = False
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        """Nothing is worth waiting for any more: the last delta is here, or the stream failed."""

    def fail(self, error: BaseException) -> None:
        """End the stream with this error, after what has been generated."""
        if not self._ended:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._over.set()
        self._changed.set()

    async def _read(self) -> None:
        try:
            async for delta in self._source:
                self._pending.append(delta)
                self._changed.set()
                if delta.finish_reason is not None:
                    self._over.set()
        except Exception as error:  # noqa: BLE001 - handed to the reader of the stream, see __aiter__
            self.fail(error)
        else:
            self._end()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        reader = asyncio.create_task(self._read())
        loop = asyncio.get_running_loop()
        next_at = 0.0
        try:
            while True:
                await self._changed.wait()
                wait_s = next_at - loop.time()
                if wait_s > 0 and not self._over.is_set():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._over.wait(), wait_s)
                self._changed.clear()
                bundle, self._pending = self._pending, []
                ended = self._ended
                if bundle:
                    next_at = loop.time() + self._interval_s()
                    yield merge(bundle)
                if ended:
                    if self._error is not None:
                        raise self._error
                    return
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()
