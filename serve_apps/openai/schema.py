"""The requests of the OpenAI API, as far as Shoal serves them.

A request with a field that would change the answer and that Shoal does not carry out is refused, never
served as if the field were not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_apps.engine.protocol import REPETITION_PENALTIES
from serve_apps.openai.fields import (
    MAX_BIASES,
    MAX_LOGPROBS,
    LogitBias,
    Prompt,
    Stop,
    StrictModel,
    TokenId,
)


class StreamOptions(BaseModel):
    """What a stream carries besides the tokens."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool | None = None


class JsonSchema(BaseModel):
    """The schema of a `response_format`; `name`, `description` and `strict` change nothing."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    # `schema` is a method of pydantic's.
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(StrictModel):
    """What form the answer's text must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def has_schema(self) -> bool:
        return self.json_schema is not None and self.json_schema.json_schema is not None

    def schema_text(self) -> str | None:
        """The JSON schema that the answer keeps to, as JSON; None for plain text."""
        if self.type == "text":
            return None
        if self.type == "json_object" or self.json_schema is None:
            return '{"type": "object"}'
        return json.dumps(self.json_schema.json_schema)


class Request(StrictModel):
    """What both endpoints share."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    )
    """Fields that change nothing about the answer."""
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "early_stopping": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "return_tokens_as_token_ids": (False,),
        "return_token_ids": (False,),
        "prompt_logprobs": (0,),
    }
    """Fields that are not carried out, with the values that ask for nothing; null asks for nothing anyway."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """Extension: only the k likeliest tokens; 0 and -1 keep all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Extension: drops tokens less likely than this part of the likeliest."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(
        default=None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1]
    )
    """Extension: as in transformers and vLLM; 1 changes nothing."""
    logit_bias: LogitBias = ()
    response_format: ResponseFormat | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    stop: Stop = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: tuple[TokenId, ...] | None = Field(
        default=None, strict=False, fail_fast=True, max_length=MAX_BIASES
    )
    """Extension: tokens that end the answer."""
    min_tokens: int | None = Field(default=None, ge=0)
    """Extension: before so many tokens no end of sequence is chosen."""
    ignore_eos: bool | None = None
    """Extension: go on after the end of sequence, up to max_tokens (for measuring)."""
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    """Extension: lower goes first, as in vLLM."""

    @property
    def choices_each(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_choices(self) -> int:
        """Answers to all prompts together."""
        return self.choices_each

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of each answer; None: as many as there is room for."""
        return self.max_tokens

    @property
    def most_tokens_field(self) -> str:
        """The field that says so."""
        return "max_tokens"

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report with each token; None reports no log-probabilities."""
        raise NotImplementedError

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams, without max_tokens and without what was not asked for."""
        seldom = {
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "json_schema": self.response_format.schema_text() if self.response_format else None,
            "stop_token_ids": self.stop_token_ids,
            "min_tokens": self.min_tokens,
        }
        return {
            "temperature": 1.0 if self.temperature is None else float(self.temperature),
            "top_p": 1.0 if self.top_p is None else float(self.top_p),
            "top_k": max(0, self.top_k or 0),
            "seed": self.seed,
            "stop": self.stop,
            "ignore_eos": bool(self.ignore_eos),
            "logprobs": self.alternatives,
            **{name: value for name, value in seldom.items() if value},
        }


class CompletionRequest(Request):
    """The body of POST /v1/completions."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Request.NEUTRAL,
        "echo": (False,),
        "suffix": ("",),
        "add_special_tokens": (True,),
        "top_logprobs": (0,),
    }

    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_choices(self) -> int:
        return len(self.prompt) * self.choices_each

    @property
    def alternatives(self) -> int | None:
        return self.logprobs
