"""The requests and answers of the OpenAI API, as far as Shoal serves them.

A request with a field that would change the answer and that Shoal does not carry out is refused, never
served as if the field were not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from serve_apps.openai_errors import ApiError, bad_request

MAX_STOPS = 16
"""Most stop strings of one request (OpenAI allows 4, vLLM any number)."""
MAX_BIASES = 1024
"""Most token ids of one request's `logit_bias`."""
MAX_LOGPROBS = 20
"""Most alternatives that are reported with a token, as in OpenAI's chat API."""

TokenIds = list[int]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _prompt(value: Any) -> list[str | TokenIds]:
    """Every form of `prompt` as the list of its prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(_is_ids(item) and item for item in value):
            return list(value)
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _stop(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else None
    if value is None:
        return ()
    if stops is None or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings, none of them empty")
    return stops


def _content(value: Any) -> str:
    """The text of a message; a list of text parts is joined."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in value
    ):
        return "".join(part["text"] for part in value)
    raise ValueError("must be a string or a list of text parts; images and audio are not supported")


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """From OpenAI's {"token id": bias} to pairs."""
    if value is None:
        return ()
    if isinstance(value, dict) and len(value) <= MAX_BIASES:
        pairs = [
            (int(token), float(bias))
            for token, bias in value.items()
            if token.isdecimal() and type(bias) in (int, float) and -100 <= bias <= 100
        ]
        if len(pairs) == len(value):
            return tuple(pairs)
    raise ValueError(
        f"must be an object of at most {MAX_BIASES} token ids, each with a bias from -100 to 100"
    )


_STRINGS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
Prompt = Annotated[
    list[str | TokenIds],
    PlainValidator(_prompt),
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS}]}),
]
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_stop),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "string"}, _STRINGS]}),
]
Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "string"}, {"type": "array"}]}),
]


LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]+$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
            ]
        }
    ),
]


class StreamOptions(BaseModel):
    """What a stream carries besides the tokens."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool | None = None


class JsonSchema(BaseModel):
    """The schema of a `response_format`; `name`, `description` and `strict` change nothing."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    # `schema` is a method of pydantic's.
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    """What form the answer's text must have."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_text(self) -> str | None:
        """The JSON schema that the answer keeps to, as JSON; None for plain text."""
        if self.type == "text":
            return None
        if self.type == "json_object" or self.json_schema is None:
            return '{"type": "object"}'
        return json.dumps(self.json_schema.json_schema or {})


class Request(BaseModel):
    """What both endpoints share; types are strict (a number in quotes is not a number)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    )
    """Fields that change nothing about the answer."""
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are not carried out, with the values that ask for nothing."""

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
    repetition_penalty: float | None = Field(default=None, gt=0)
    """Extension: as in transformers and vLLM; 1 changes nothing."""
    logit_bias: LogitBias = ()
    response_format: ResponseFormat | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    stop: Stop = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, strict=False, max_length=MAX_BIASES
    )
    """Extension: tokens that end the answer."""
    min_tokens: int = Field(default=0, ge=0)
    """Extension: before so many tokens no end of sequence is chosen."""
    ignore_eos: bool = False
    """Extension: go on after the end of sequence, up to max_tokens (for measuring)."""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Extension: lower goes first, as in vLLM."""

    @property
    def choices_each(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

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
            "ignore_eos": self.ignore_eos,
            "logprobs": self.alternatives,
            **{name: value for name, value in seldom.items() if value},
        }


class CompletionRequest(Request):
    """The body of POST /v1/completions."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (None, 1),
        "echo": (None, False),
        "suffix": (None, ""),
    }

    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Message(BaseModel):
    """One turn of a conversation, as the model's chat template gets it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    """Calls that the assistant made."""
    tool_call_id: str | None = None
    """The call that a tool's message answers."""


class ChatRequest(Request):
    """The body of POST /v1/chat/completions."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
    }

    messages: tuple[Message, ...] = Field(min_length=1, strict=False)
    tools: list[dict[str, Any]] | None = None
    """Handed to the model's chat template; calls in the answer are text."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Kind = TypeVar("Kind", bound=BaseModel)


def parse_fields(kind: type[Kind], document: Any) -> Kind:
    """The request in `document` (decoded JSON), as the fields of its kind say.

    Raises:
        ApiError: 400, naming the first field that is wrong and what it may be.
    """
    if not isinstance(document, dict):
        raise bad_request(f"The request body must be a JSON object, not {_kind_of(document)}.")
    ignored: frozenset[str] = getattr(kind, "IGNORED", frozenset())
    try:
        return kind.model_validate({name: value for name, value in document.items() if name not in ignored})
    except ValidationError as error:
        raise _sentence(error) from None


def parse(kind: type[Request], document: Any) -> Request:
    """The request in `document` (decoded JSON).

    Raises:
        ApiError: 400, naming the first field that is wrong and what it may be.
    """
    fields = document
    if isinstance(document, dict):
        fields = {name: value for name, value in document.items() if name not in kind.NEUTRAL}
        for name in document.keys() & kind.NEUTRAL.keys():
            _check_neutral(kind, name, document[name])
    request = parse_fields(kind, fields)
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    if isinstance(request, ChatRequest):
        _check_messages(request)
    if request.stream_options is not None and not request.streamed:
        raise bad_request("'stream_options' needs 'stream': true.", param="stream_options")
    return request


def _check_neutral(kind: type[Request], name: str, value: Any) -> None:
    # 0 == False in Python, but a penalty of `false` is a mistake: the types must agree too.
    if not any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in kind.NEUTRAL[name]
    ):
        raise bad_request(
            f"'{name}' is not supported by this server; leave it out.",
            param=name,
            code="unsupported_parameter",
        )


def _check_messages(request: ChatRequest) -> None:
    for number, message in enumerate(request.messages):
        if "content" not in message.model_fields_set and message.tool_calls is None:
            raise bad_request(
                f"'messages.{number}.content' is required.",
                param=f"messages.{number}.content",
                code="missing_required_parameter",
            )


def _sentence(error: ValidationError) -> ApiError:
    """The first mistake as a sentence about the request's own field."""
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    field = str(first["loc"][0]) if first["loc"] else None
    kind = first["type"]
    if kind == "missing":
        return bad_request(f"'{path}' is required.", param=path, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return bad_request(f"Unknown parameter '{path}'.", param=path, code="unknown_parameter")
    says: Mapping[str, Callable[[], str]] = {
        "value_error": lambda: str(first["ctx"]["error"]),
        "bool_type": lambda: "must be true or false",
        "string_type": lambda: "must be a string",
        "int_type": lambda: "must be an integer",
        "float_type": lambda: "must be a number",
    }
    message = says[kind]() if kind in says else first["msg"][0].lower() + first["msg"][1:]
    return bad_request(
        f"'{path}' is wrong: {message} (given: {_short(first['input'])}).",
        param=field,
        code="invalid_type" if kind.endswith("_type") else "invalid_value",
    )


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return _kind_of(value)
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
