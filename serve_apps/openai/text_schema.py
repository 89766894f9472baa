"""The requests of /v1/embeddings (OpenAI's), /tokenize and /detokenize (vLLM's)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from serve_apps.openai.chat_schema import Message
from serve_apps.openai.fields import Prompt, StrictModel, TokenId
from serve_apps.openai.tools import Tools


class TextRequest(StrictModel):
    """What these requests share."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"user"})
    """Fields that change nothing about the answer."""

    model: str


class EmbeddingRequest(TextRequest):
    """The body of POST /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None


class TokenizeRequest(TextRequest):
    """The body of POST /tokenize."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
            ]
        }
    )

    prompt: str | None = None
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1, strict=False, fail_fast=True)
    tools: Tools = None


class DetokenizeRequest(TextRequest):
    """The body of POST /detokenize."""

    tokens: tuple[TokenId, ...] = Field(strict=False, fail_fast=True)
