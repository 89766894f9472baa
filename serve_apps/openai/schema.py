"""The requests of the OpenAI API, as far as Shoal serves them.

A request with a field that would change the answer and that Shoal does not carry out is refused, never
served as if the field were not there.

Written by hand: the types of OpenAI's own package are for who sends. They check nothing, know nothing of what
Shoal takes beside, and do not bound what a wrong body costs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_apps.engine.protocol import REPETITION_PENALTIES
from serve_apps.openai.fields import (
    MAX_ALLOWED,
    MAX_BIASES,
    MAX_LOGPROBS,
    BadWords,
    LogitBias,
    PromptField,
    Stop,
    StrictModel,
    TextChoice,
    TokenId,
)


class StreamOptions(BaseModel):
    """What a stream carries besides the tokens."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool | None = None
    """The last part says what was taken."""
    continuous_usage_stats: bool | None = None
    """Extension: with `include_usage`, each part says what was taken until then, as in vLLM."""


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


class StructuredOutputs(StrictModel):
    """What form the answer's text has, as vLLM's clients say it: by one of the first five fields."""

    schema_of_json: dict[str, Any] | str | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """An expression of Rust's `regex`, which the whole answer matches."""
    choice: TextChoice = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """A grammar in the language of Lark or of GBNF."""
    disable_any_whitespace: bool | None = None
    """Answers in JSON have no blanks between their parts in any case."""
    disable_additional_properties: Literal[False] | None = None
    """Not supported: say it in the schema."""
    whitespace_pattern: None = None
    """Not supported."""
    structural_tag: None = None
    """Not supported."""

    @property
    def given(self) -> list[str]:
        """The fields that say what form it is."""
        said = {
            "json": self.schema_of_json is not None,
            "json_object": bool(self.json_object),
            "regex": self.regex is not None,
            "choice": self.choice is not None,
            "grammar": self.grammar is not None,
        }
        return [name for name, is_said in said.items() if is_said]

    def sampling(self) -> dict[str, Any]:
        """The field of SamplingParams."""
        if self.schema_of_json is not None:
            schema = self.schema_of_json
            return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}
        if self.json_object:
            return {"json_schema": '{"type": "object"}'}
        if self.choice is not None:
            return {"choice": self.choice}
        return {"regex": self.regex} if self.regex is not None else {"grammar": self.grammar}


class Request(StrictModel):
    """What both endpoints share."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
            *("prompt_cache_options", "prompt_cache_retention", "prediction", "verbosity"),
        }
    )
    """Fields that change nothing about the answer."""
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "early_stopping": (False,),
        "spaces_between_special_tokens": (True,),
    }
    """Fields that are not carried out, with the values that ask for nothing; null asks for nothing anyway."""
    REPLACED: ClassVar[Mapping[str, str]] = {
        f"guided_{name}": f"structured_outputs.{name}" for name in ("json", "regex", "choice", "grammar")
    }
    """Fields of earlier versions of vLLM, which it passes over by now, and what says the same."""

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
    structured_outputs: StructuredOutputs | None = None
    """Extension: what form the answer has, as in vLLM."""
    n: int | None = Field(default=None, ge=1, le=128)
    stop: Stop = ()
    include_stop_str_in_output: bool | None = None
    """Extension: the text has what ended it, a stop string or (where special tokens are text) a token."""
    skip_special_tokens: bool | None = None
    """Extension: false: special tokens are text as well."""
    allowed_token_ids: tuple[TokenId, ...] | None = Field(
        default=None, strict=False, fail_fast=True, min_length=1, max_length=MAX_ALLOWED
    )
    """Extension: the only tokens that may come."""
    bad_words: BadWords = ()
    """Extension: words that may not come, as their usual tokens, with a blank before them and without."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    """Extension: of a longer prompt only so many tokens are read; -1: as many as the context has room for."""
    truncation_side: Literal["left", "right"] | None = None
    """Extension: where such a prompt is cut. `left`, the default, keeps its end."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Extension: the log-probabilities of the prompt's tokens, each with so many alternatives."""
    return_tokens_as_token_ids: bool | None = None
    """Extension: log-probabilities name tokens `token_id:ID`."""
    return_token_ids: bool | None = None
    """Extension: the answer has the ids of the prompt's tokens and of its own."""
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
    cache_salt: str | None = Field(default=None, min_length=1)
    """Extension: of the prefix cache, only what requests with the same salt have left there is used, as in
    vLLM. Tenants are kept apart anyway."""

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
    def continuous_usage(self) -> bool:
        """Whether each part of a stream says what was taken until then."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

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

    @property
    def prompt_alternatives(self) -> int | None:
        """As `alternatives`, of the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def echoes(self) -> bool:
        """Whether answers begin with their prompts."""
        return False

    def prompt_options(self) -> dict[str, Any]:
        """How a replica is to read the prompt, and what it is to tell of it; only what was asked for."""
        seldom = {
            "cut": self.truncate_prompt_tokens,
            "cut_side": self.truncation_side if self.truncate_prompt_tokens is not None else None,
            "echo": self.echoes or None,
            "token_ids": self.return_token_ids or None,
            "names_are_ids": self.return_tokens_as_token_ids or None,
            "structure_field": "structured_outputs" if self.structured_outputs is not None else None,
        }
        return {name: value for name, value in seldom.items() if value is not None}

    def prompts(self) -> list[dict[str, Any]]:
        """What a replica is asked to go on with, for each prompt; see `Replica.generate`."""
        raise NotImplementedError

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams, without max_tokens and without what was not asked for."""
        seldom = {
            "include_stop": self.include_stop_str_in_output,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words,
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
            **({} if self.prompt_alternatives is None else {"prompt_logprobs": self.prompt_alternatives}),
            **({"skip_special_tokens": False} if self.skip_special_tokens is False else {}),
            **({} if self.structured_outputs is None else self.structured_outputs.sampling()),
        }


class CompletionRequest(Request):
    """The body of POST /v1/completions."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Request.NEUTRAL,
        "suffix": ("",),
        "top_logprobs": (0,),
    }

    prompt: PromptField
    max_tokens: int | None = Field(default=None, ge=0)
    """0, with `echo`: nothing is generated."""
    echo: bool | None = None
    """The answer begins with the prompt, and so do its log-probabilities."""
    add_special_tokens: bool | None = None
    """Extension: false: the tokenizer adds none to a text."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_choices(self) -> int:
        return len(self.prompt) * self.choices_each

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        if self.prompt_logprobs is not None or not self.echo:
            return self.prompt_logprobs
        # An engine that is to generate nothing has this to do.
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def prompt_options(self) -> dict[str, Any]:
        options = super().prompt_options()
        return {**options, "special_tokens": False} if self.add_special_tokens is False else options

    def prompts(self) -> list[dict[str, Any]]:
        return [{"prompt": prompt} for prompt in self.prompt]
