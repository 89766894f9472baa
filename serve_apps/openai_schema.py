"""The requests and answers of the OpenAI API, as far as Shoal serves them.

A request with a field that would change the answer and that Shoal does not carry out is refused, never
served as if the field were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from serve_apps.openai_errors import ApiError, bad_request

MAX_STOPS = 16
"""Most stop strings of one request (OpenAI allows 4, vLLM any number)."""
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


class StreamOptions(BaseModel):
    """What a stream carries besides the tokens."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool | None = None


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
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = Field(default=None, ge=1, le=128)
    stop: Stop = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    """Extension: go on after the end of sequence, up to max_tokens (for measuring)."""

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
        """The fields of SamplingParams, without max_tokens."""
        return {
            "temperature": 1.0 if self.temperature is None else float(self.temperature),
            "top_p": 1.0 if self.top_p is None else float(self.top_p),
            "top_k": max(0, self.top_k or 0),
            "seed": self.seed,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "logprobs": self.alternatives,
        }


class CompletionRequest(Request):
    """The body of POST /v1/completions."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (None, 1),
        "echo": (None, False),
        "suffix": (None, ""),
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "logit_bias": (None, {}),
    }

    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    refusal: str | None = None


class ChatRequest(Request):
    """The body of POST /v1/chat/completions."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "logit_bias": (None, {}),
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
    }

    messages: tuple[Message, ...] = Field(min_length=1, strict=False)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def parse(kind: type[Request], document: Any) -> Request:
    """The request in `document` (decoded JSON).

    Raises:
        ApiError: 400, naming the first field that is wrong and what it may be.
    """
    if not isinstance(document, dict):
        raise bad_request(f"The request body must be a JSON object, not {_kind_of(document)}.")
    fields = {}
    for name, value in document.items():
        if name in kind.IGNORED:
            continue
        if name in kind.NEUTRAL:
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
            continue
        fields[name] = value
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _sentence(error) from None
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    if request.stream_options is not None and not request.streamed:
        raise bad_request("'stream_options' needs 'stream': true.", param="stream_options")
    return request


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


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is not 2xx."""

    error: ErrorDetail


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class CompletionAnswer(BaseModel):
    """The answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatAnswer(BaseModel):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None


class ModelCard(BaseModel):
    """One app, as /v1/models shows it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    version: str
    context_length: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]
