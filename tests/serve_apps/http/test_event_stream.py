"""What waits for a client that reads slowly is bounded, in order and whole."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.http.event_stream import PIECE_BYTES, Unsent
from serve_apps.openai.errors import ApiError


@given(st.lists(st.one_of(st.integers(0, 40), st.none()), max_size=60))
def test_events_come_in_their_order_in_whole_pieces(steps: list[int | None]) -> None:
    """A number puts an event of so many KiB, 0 one without anything in it; None takes a piece."""

    async def go() -> None:
        unsent = Unsent()
        put: list[bytes] = []
        got: list[bytes] = []
        waiting = 0
        for number, step in enumerate(steps):
            if step is not None:
                event = b"%d:" % number + b"x" * (step * 1024) + b";" if step else b""
                put.append(event)
                unsent.put(event)
                waiting += len(event)
            elif waiting:
                piece = await unsent.get()
                assert piece is not None
                assert piece.endswith(b";")
                assert len(piece) < PIECE_BYTES + 41 * 1024
                got.append(piece)
                waiting -= len(piece)
        unsent.end()
        while (piece := await unsent.get()) is not None:
            assert piece, "an empty piece would end the answer for whoever writes it in chunks"
            got.append(piece)
        assert b"".join(got) == b"".join(put)

    asyncio.run(go())


def test_a_client_that_is_too_far_behind_keeps_nothing() -> None:
    async def go() -> None:
        unsent = Unsent(most_bytes=100)
        unsent.put(b"x" * 1000)  # one event is taken whatever its size
        with pytest.raises(ApiError) as refused:
            unsent.put(b"y")
        assert refused.value.code == "client_too_slow"
        unsent.end(b"why")
        assert [await unsent.get(), await unsent.get()] == [b"why", None]

    asyncio.run(go())


def test_why_it_ended_is_said_however_much_waits() -> None:
    async def go() -> None:
        unsent = Unsent(most_bytes=100)
        unsent.put(b"x" * 99)
        unsent.end(b"why")
        assert [await unsent.get(), await unsent.get()] == [b"x" * 99 + b"why", None]

    asyncio.run(go())


def test_a_piece_is_waited_for() -> None:
    async def go() -> None:
        unsent = Unsent()
        reading = asyncio.create_task(unsent.get())
        await asyncio.sleep(0)
        assert not reading.done()
        unsent.put(b"a")
        unsent.put(b"b")
        assert await reading == b"ab"
        ending = asyncio.create_task(unsent.get())
        await asyncio.sleep(0)
        unsent.put(b"")
        await asyncio.sleep(0)
        assert not ending.done()
        unsent.end()
        assert await ending is None

    asyncio.run(go())
