"""From what an engine generates to what a gateway learns of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from serve_apps.engine.protocol import Delta
from serve_apps.parsing.answer_parser import Reader

Piece = Callable[[int], tuple[str, bytes]]
"""The text and the bytes of a token id."""


async def items(
    deltas: AsyncIterator[Delta], piece: Piece, reader: Reader | None
) -> AsyncIterator[dict[str, Any]]:
    """What the gateway learns of each delta, see `tokens.inbox.Item`; closes the deltas at its end.

    Args:
        reader: reads the text; None where all of it is words.
    """
    async with aclosing(deltas):  # type: ignore[type-var]
        async for delta in deltas:
            item = _item(delta, piece)
            if reader is not None:
                _read(reader, delta, item)
            yield item
            if item.get("finish_reason") is not None:
                return


def _read(reader: Reader, delta: Delta, item: dict[str, Any]) -> None:
    """Put what the reader makes of a delta's text in its place."""
    told = reader.read(delta.text, delta.token_ids, finished=delta.finish_reason is not None)
    item["text"] = told.text
    if told.reasoning:
        item["reasoning"] = told.reasoning
    if told.calls:
        item["calls"] = told.calls
    if told.thought and delta.token_ids:
        item["reasoning_tokens"] = len(delta.token_ids)
    if reader.complete or (reader.num_calls and delta.finish_reason == "stop"):
        # Nothing more is told of an answer that is complete: its engine need not go on with it.
        item["finish_reason"] = "tool_calls"


def _item(delta: Delta, piece: Piece) -> dict[str, Any]:
    item: dict[str, Any] = {"text": delta.text, "token_ids": delta.token_ids}
    if delta.logprobs:
        item["logprobs"] = [
            (
                *piece(entry.token_id),
                entry.logprob,
                [(*piece(token_id), token_id, logprob) for token_id, logprob in entry.top],
            )
            for entry in delta.logprobs
        ]
    if delta.finish_reason is not None:
        item["finish_reason"] = delta.finish_reason
    return item
