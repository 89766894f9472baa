"""Requests about texts: OpenAI's embeddings; vLLM's pooling, scores, reranking, tokenizing, detokenizing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from serve_apps.openai.chat_schema import Message, template_of
from serve_apps.openai.fields import Documents, PromptField, StrictModel, Texts, TokenId
from serve_apps.openai.tools import Tools


class TextRequest(StrictModel):
    """What these requests share."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"user"})
    """Fields that change nothing about the answer."""

    model: str | None = None
    """May be left out where the caller sees a single model."""


class ReadRequest(TextRequest):
    """What requests for embeddings share."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "padding": ("do_not_pad",),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "priority": (0,),
    }
    """Fields that are not carried out, with the values that ask for nothing."""

    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    """Extension: of a longer input only so many tokens are read; -1: as many as the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """Extension: where such an input is cut. `right`, the default, keeps its beginning."""

    def cut(self) -> dict[str, Any]:
        """How much a replica is to read of each input."""
        if self.truncate_prompt_tokens is None:
            return {}
        return {"cut": self.truncate_prompt_tokens, "cut_side": self.truncation_side or "right"}


class EmbeddingRequest(ReadRequest):
    """The body of POST /v1/embeddings."""

    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, lt=2**31)
    """The first so many numbers, scaled to length 1; of models whose config says that they are made so."""
    use_activation: bool | None = None
    """Extension: true: scaled to length 1."""
    add_special_tokens: bool | None = None
    """Extension: false: the tokenizer adds none to a text."""

    def asks(self) -> list[dict[str, Any]]:
        """What replicas are asked, one for each input."""
        seldom = {"dimensions": self.dimensions, "scaled": self.use_activation or None, **self.cut()}
        if self.add_special_tokens is False:
            seldom["special_tokens"] = False
        how = {name: value for name, value in seldom.items() if value is not None}
        return [{"prompt": prompt, **how} for prompt in self.input]


class PoolingRequest(EmbeddingRequest):
    """The body of POST /pooling, whose answer is of embeddings, too."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {**ReadRequest.NEUTRAL, "task": ("embed",)}


class ScoringRequest(ReadRequest):
    """What /score and /rerank share."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ReadRequest.NEUTRAL,
        "use_activation": (True, False),
        "instruction": (),
        "chat_template_kwargs": ({},),
        "max_tokens_per_query": (0,),
    }

    max_tokens_per_doc: int | None = Field(default=None, ge=0, lt=2**31)
    """The first so many tokens of each document are read; 0: all."""

    def cut_document(self, context_length: int) -> dict[str, Any]:
        """As `cut`, of a document."""
        if not self.max_tokens_per_doc:
            return self.cut()
        bounds = [self.max_tokens_per_doc, context_length]
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens > 0:
            bounds.append(self.truncate_prompt_tokens)
        return {"cut": min(bounds), "cut_side": "right"}


PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names that the texts of a request for scores may have, as in vLLM."""


class ScoreRequest(ScoringRequest):
    """The body of POST /score: two texts, or lists of them, under one of four pairs of names."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {
                    "required": list(pair),
                    "properties": {
                        name: {"not": {"type": "null"}} if name in pair else {"type": "null"}
                        for name in sorted({name for names in PAIRS for name in names})
                    },
                }
                for pair in PAIRS
            ]
        }
    )

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None


class RerankRequest(ScoringRequest):
    """The body of POST /rerank."""

    query: str = Field(min_length=1)
    documents: Documents
    top_n: int | None = Field(default=None, ge=0, lt=2**31)
    """Only the best so many; 0: all."""
    return_documents: bool | None = None
    """False: their texts are left out of the answer."""


class TokenizeRequest(TextRequest):
    """The body of POST /tokenize."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

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
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own; by default to a prompt, not to what a chat template has written."""
    return_token_strs: bool | None = None
    """The answer has each token's name too."""
    add_generation_prompt: bool | None = None
    """Of messages: false: without what begins an answer."""
    continue_final_message: bool | None = None
    """Of messages: the last one stays open."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Of messages: further arguments of the model's chat template."""

    def template(self) -> dict[str, Any]:
        """As `ChatRequest.template`."""
        return template_of(
            self.tools,
            self.chat_template_kwargs,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
        )


class DetokenizeRequest(TextRequest):
    """The body of POST /detokenize."""

    tokens: tuple[TokenId, ...] = Field(strict=False, fail_fast=True)
