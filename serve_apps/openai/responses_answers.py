"""What the gateway answers at /v1/responses, for the API's document; by hand, see `answers`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

# pydantic reads these, and takes those of `typing` from Python 3.12 on only.
from typing_extensions import TypedDict


class CachedInput(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ReasonedOutput(TypedDict):
    reasoning_tokens: int


class ResponsesUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedInput
    output_tokens: int
    output_tokens_details: ReasonedOutput
    total_tokens: int


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponsesFailure(TypedDict):
    """Why a stream broke off; `type` is the code that other endpoints give."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    type: str | None
    param: str | None


class ResponsesAnswer(TypedDict):
    """The answer of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponsesFailure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    output: list[dict[str, Any]]
    """Items: `reasoning`, `message`, `function_call`."""
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None


class ResponsesEvent(TypedDict):
    """One event of a streamed response; its name is its `type`."""

    type: str
    sequence_number: int
    response: NotRequired[ResponsesAnswer]
    """In the first two, and in the last: `response.completed`, `.incomplete` or `.failed`."""
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[dict[str, Any]]
    part: NotRequired[dict[str, Any]]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[list[dict[str, Any]]]


class InputTokens(TypedDict):
    """The answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


def input_tokens_of(count: int) -> InputTokens:
    return {"object": "response.input_tokens", "input_tokens": count}
