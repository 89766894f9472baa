"""What the gateway answers at /v1/messages: for who makes an answer, and for the API's document.

By hand, as those of OpenAI's API; Anthropic's client reads all of them in the tests.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

# pydantic reads these, and takes those of `typing` from Python 3.12 on only.
from typing_extensions import TypedDict


class MessagesErrorDetail(TypedDict):
    type: str
    message: str


class MessagesErrorAnswer(TypedDict):
    """Every answer of these endpoints that is not 2xx, and the last event of a stream that breaks off."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


class MessagesUsage(TypedDict):
    input_tokens: int
    """Without those that were found in the cache."""
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesAnswer(TypedDict):
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks: `thinking`, `text`, `tool_use`."""
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesEvent(TypedDict):
    """One event of a streamed message; its name is its `type`."""

    type: str
    message: NotRequired[MessagesAnswer]
    index: NotRequired[int]
    content_block: NotRequired[dict[str, Any]]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessagesUsage]


class TokenCount(TypedDict):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int
