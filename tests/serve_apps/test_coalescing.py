"""Bundles of deltas: nothing lost, nothing late, the source closed when nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from serve_apps.coalescing import Coalescer, merge
from serve_apps.engine.protocol import Delta, EngineError, TokenLogprob


class Source:
    """A stream of deltas that the test feeds."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self.closed = False

    def put(self, *texts: str, last: bool = False) -> None:
        for number, text in enumerate(texts):
            ended = last and number == len(texts) - 1
            self.queue.put_nowait(Delta(text, (len(text),), (), "stop" if ended else None))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while True:
                delta = await self.queue.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.closed = True


def coalesced(source: Source, interval_s: float) -> tuple[Coalescer, AsyncIterator[Delta]]:
    coalescer = Coalescer(source.__aiter__(), lambda: interval_s)
    return coalescer, coalescer.__aiter__()


def test_a_bundle_is_the_sum_of_its_deltas() -> None:
    entry = TokenLogprob("b", 2, -1.0)
    bundle = merge([Delta("a", (1,)), Delta("b", (2,), (entry,)), Delta("", (), (), "stop")])
    assert bundle == Delta("ab", (1, 2), (entry,), "stop")


def test_the_first_goes_at_once_the_rest_in_bundles_and_the_last_without_waiting() -> None:
    async def go() -> None:
        source = Source()
        _, stream = coalesced(source, interval_s=60)
        source.put("a")
        async with asyncio.timeout(5):
            assert (await anext(stream)).text == "a"
            source.put("b", "c", "d", last=True)
            rest = [delta async for delta in stream]
        assert [(delta.text, delta.finish_reason) for delta in rest] == [("bcd", "stop")]
        assert source.closed

    asyncio.run(go())


def test_after_the_interval_a_bundle_goes_though_more_is_to_come() -> None:
    async def go() -> None:
        source = Source()
        _, stream = coalesced(source, interval_s=0.02)
        source.put("a")
        async with asyncio.timeout(5):
            assert (await anext(stream)).text == "a"
            source.put("b", "c")
            assert (await anext(stream)).text == "bc"
            await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(go())


def test_closing_closes_the_source() -> None:
    async def go() -> None:
        source = Source()
        _, stream = coalesced(source, interval_s=0)
        source.put("a")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert source.closed

    asyncio.run(go())


def test_cancelling_the_reader_closes_the_source() -> None:
    async def go() -> None:
        source = Source()
        _, stream = coalesced(source, interval_s=0)

        async def read() -> None:
            async for _ in stream:
                pass

        source.put("a")
        task = asyncio.create_task(read())
        while not source.queue.empty():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.closed

    asyncio.run(go())


@pytest.mark.parametrize("from_outside", [True, False])
def test_an_error_comes_after_what_was_generated(from_outside: bool) -> None:
    async def go() -> None:
        source = Source()
        coalescer, stream = coalesced(source, interval_s=60)
        source.put("a")
        assert (await anext(stream)).text == "a"
        source.put("b")
        while not source.queue.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        if from_outside:
            coalescer.fail(EngineError("rank 1 ended"))
        else:
            source.queue.put_nowait(EngineError("rank 1 ended"))
        assert (await anext(stream)).text == "b"
        with pytest.raises(EngineError, match="rank 1"):
            await anext(stream)
        assert source.closed

    asyncio.run(go())
