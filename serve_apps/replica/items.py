"""From what an engine generates to what a gateway learns of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from serve_apps.engine.protocol import Delta
from serve_apps.parsing.answer_parser import Reader
from serve_apps.replica.item_maker import ItemMaker


async def items(
    deltas: AsyncIterator[Delta], maker: ItemMaker, reader: Reader | None
) -> AsyncIterator[dict[str, Any]]:
    """What the gateway learns of each delta, see `tokens.inbox.Item`; closes the deltas at its end.

    Args:
        reader: reads the text; None where all of it is words.
    """
    async with aclosing(deltas):  # type: ignore[type-var]
        async for delta in deltas:
            item = item_of(delta, maker, reader)
            yield item
            if item.get("finish_reason") is not None:
                return


def item_of(delta: Delta, maker: ItemMaker, reader: Reader | None) -> dict[str, Any]:
    """What the gateway learns of one delta; with a `finish_reason` in it there is nothing more to tell."""
    item = maker.item(delta)
    if reader is not None:
        _read(reader, delta, item)
    return item


def _read(reader: Reader, delta: Delta, item: dict[str, Any]) -> None:
    """Put what the reader makes of a delta's text in its place."""
    told = reader.read(delta.text, delta.token_ids, finished=delta.finish_reason is not None)
    item["text"] = told.text
    if told.reasoning:
        item["reasoning"] = told.reasoning
    if told.calls:
        item["calls"] = told.calls
    if told.text_after_calls:
        item["text_after_calls"] = told.text_after_calls
    if told.thought and delta.token_ids:
        item["reasoning_tokens"] = len(delta.token_ids)
    if told.thought or not told.answers:
        item["lead_tokens"] = len(delta.token_ids)
    elif reader.num_calls:
        item["call_tokens"] = len(delta.token_ids)
    if reader.complete or (reader.num_calls and delta.finish_reason == "stop"):
        # Nothing more is told of an answer that is complete: its engine need not go on with it.
        item["finish_reason"] = "tool_calls"
