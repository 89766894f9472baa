"""What the gateway answers: the one source for who makes an answer, and for the API's document.

They are plain dictionaries while they are made, since a part of a stream is made for every token.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

# pydantic reads these, and takes those of `typing` from Python 3.12 on only.
from typing_extensions import TypedDict


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """Every answer that is not 2xx."""

    error: ErrorDetail


class CompletionTokens(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: NotRequired[CompletionTokens]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CompletionAnswer(TypedDict):
    """The answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None


class CompletionChunk(TypedDict):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


class CalledFunction(TypedDict):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatAnswer(TypedDict):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None


class CallDelta(TypedDict):
    """What one call gained; the first piece has its id, its type and its function's name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: dict[str, str]


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: str
    tool_calls: list[CallDelta]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(TypedDict):
    """One event of a streamed answer to a conversation."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or the base64 of their float32s in little-endian order."""


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(TypedDict):
    """The answer of POST /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenizeAnswer(TypedDict):
    """The answer of POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeAnswer(TypedDict):
    """The answer of POST /detokenize."""

    prompt: str


class ModelCard(TypedDict):
    """One app, as /v1/models shows it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    version: str
    context_length: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class HealthAnswer(TypedDict):
    status: Literal["ok"]


class ReadyAnswer(TypedDict):
    """Every app could answer now."""

    status: Literal["ready"]
    apps: list[str]


class AppAnswer(TypedDict):
    """What an app was deployed with."""

    spec: dict[str, Any]
    ready: bool
