"""What the gateway answers: the one source for who makes an answer, and for the API's document.

They are plain dictionaries while they are made, since a part of a stream is made for every token.
The models of OpenAI's package take longer to make, and know nothing of what Shoal adds; its client reads all
of this in the tests.
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


class PromptTokensDetails(TypedDict):
    cached_tokens: int
    """Of the prompts' tokens, those that the engine had in its cache."""


class CompletionTokens(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokens]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null: of a prompt's first token, before which there is nothing."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    """What the model says of a token at a place of the prompt."""

    logprob: float
    rank: int
    """Its place among all tokens, 1 for the likeliest."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Of each token of a prompt, by token ids: itself and its alternatives; null of the first."""


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


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
    token_ids: NotRequired[list[int]]


class ChatAnswer(TypedDict):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


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
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """One event of a streamed answer to a conversation."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


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


class PoolingData(TypedDict):
    object: Literal["pooling"]
    index: int
    data: list[float] | str
    """As an embedding's."""


class PoolingAnswer(TypedDict):
    """The answer of POST /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingData]
    usage: EmbeddingUsage


class Score(TypedDict):
    object: Literal["score"]
    index: int
    score: float
    """The cosine of the angle between the embeddings of the two texts."""


class ScoreAnswer(TypedDict):
    """The answer of POST /score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RerankedDocument(TypedDict):
    text: str


class RerankResult(TypedDict):
    index: int
    document: NotRequired[RerankedDocument]
    relevance_score: float


class RerankAnswer(TypedDict):
    """The answer of POST /rerank, best first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class TokenizeAnswer(TypedDict):
    """The answer of POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class TokenizerInfo(TypedDict):
    """The answer of GET /tokenizer_info: what the tokenizer's config has, and at least these."""

    tokenizer_class: str
    eos_token: str | None
    bos_token: str | None
    chat_template: NotRequired[str]


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
    max_model_len: int
    """The same by vLLM's name, which its clients look for."""


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class HealthAnswer(TypedDict):
    status: Literal["ok"]


class ReadyAnswer(TypedDict):
    """Every app could answer now."""

    status: Literal["ready"]
    apps: NotRequired[list[str]]
    """Those that the caller may ask; not to a caller without a key, where the gateway has keys."""


class VersionAnswer(TypedDict):
    version: str


class LoadAnswer(TypedDict):
    server_load: int


class AppAnswer(TypedDict):
    """What an app was deployed with."""

    spec: dict[str, Any]
    ready: bool
