"""What the requests' schemas are made of: fields that come in several forms, each read into one.

Whatever is wrong with a body is found at its first mistake: a body of mistakes costs no more than its size.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from serve_apps.openai.turns import arguments_of

MAX_PROMPTS = 2048
"""Most prompts of one request, as OpenAI's API takes inputs."""
MAX_STOPS = 16
"""Most stop strings of one request (OpenAI allows 4, vLLM any number)."""
MAX_BIASES = 1024
"""Most token ids of one request's `logit_bias`."""
MAX_ALLOWED = 4096
"""Most token ids of one request's `allowed_token_ids`."""
MAX_BAD_WORDS, MAX_BAD_WORD = 128, 256
"""Most bad words of one request (vLLM takes as many), and most characters of each."""
MAX_CHOICES = 4096
"""Most texts of one `choice`."""
MAX_LOGPROBS = 20
"""Most alternatives that are reported with a token, as in OpenAI's chat API."""

MAX_TOKEN_ID = 2**31 - 1
"""No vocabulary is larger; what a model has no token for it says itself."""

TokenIds = list[int]

UNKNOWN_FIELD = "unknown_field"
"""The kind of mistake that a field is which the schema does not have; its context has the `name`."""


class StrictModel(BaseModel):
    """An object whose types are strict (a number in quotes is not a number) and whose fields are all known.

    Its sequences have `fail_fast`, which has pydantic stop at the first item that is wrong.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _stop_at_the_first_unknown_field(cls, document: Any) -> Any:
        if cls.model_config["extra"] == "allow":
            return document
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if isinstance(document, dict) and not document.keys() <= known:
            unknown = next(name for name in document if name not in known)
            raise PydanticCustomError(UNKNOWN_FIELD, "unknown field {name}", {"name": unknown})
        return document


_TEXT_PARTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
"""Kinds of parts of a message that are text, and the field that has it."""


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value)


def _prompt(value: Any) -> list[str | TokenIds]:
    """Every form of `prompt` as the list of its prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"must hold at most {MAX_PROMPTS} prompts, not {len(value)}")
        if all(isinstance(item, str) for item in value) or all(_is_ids(item) and item for item in value):
            return list(value)
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _texts(value: Any) -> list[str] | None:
    """One text, or several, as the list of them."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if (
        isinstance(texts, list)
        and 0 < len(texts) < MAX_PROMPTS
        and all(isinstance(one, str) for one in texts)
    ):
        return texts
    raise ValueError(f"must be a string or a list of 1 to {MAX_PROMPTS - 1} strings")


def _stop(value: Any) -> tuple[str, ...]:
    if value is None or value == "":
        return ()
    stops = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else None
    if stops is None or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings, none of them empty")
    return stops


def _bad_words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if (
        isinstance(value, list)
        and len(value) <= MAX_BAD_WORDS
        and all(isinstance(word, str) and len(word) <= MAX_BAD_WORD and word.strip() for word in value)
    ):
        return tuple(dict.fromkeys(value))
    raise ValueError(
        f"must be a list of at most {MAX_BAD_WORDS} words, each of 1 to {MAX_BAD_WORD} characters"
    )


def _choice(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if (
        isinstance(value, list)
        and 0 < len(value) <= MAX_CHOICES
        and all(isinstance(text, str) for text in value)
    ):
        return tuple(value)
    raise ValueError(f"must be a list of 1 to {MAX_CHOICES} strings")


def content_text(value: Any) -> str:
    """The text of a message; a list of text parts is joined."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = [_text_of(part) for part in value]
        if None not in texts:
            return "".join(text for text in texts if text)
    raise ValueError("must be a string or a list of text parts; images and audio are not supported")


def _tool_calls(value: Any) -> list[dict[str, Any]] | None:
    """Calls that a model made, their arguments as objects: templates want those, clients send strings."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("must be a list of calls")
    return [_tool_call(number, call) for number, call in enumerate(value)]


def _tool_call(number: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"call {number} must be an object whose 'function' has a 'name'")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = arguments_of(arguments)
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError(f"the arguments of call {number} must be an object, as JSON in a string")
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _text_of(part: Any) -> str | None:
    """The text of one part of a message; None where it is none."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
    return text if isinstance(text, str) else None


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """From OpenAI's {"token id": bias} to pairs."""
    if value is None:
        return ()
    if isinstance(value, dict) and len(value) <= MAX_BIASES:
        pairs = [
            (int(token), float(bias))
            for token, bias in value.items()
            if token.isascii()
            and token.isdecimal()
            and int(token) <= MAX_TOKEN_ID
            and type(bias) in (int, float)
            and -100 <= bias <= 100
        ]
        if len(pairs) == len(value):
            return tuple(pairs)
    raise ValueError(
        f"must be an object of at most {MAX_BIASES} token ids, each with a bias from -100 to 100"
    )


_STRINGS = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}}
_ID = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_IDS = {"type": "array", "minItems": 1, "items": _ID}
_STOP = {"type": "string", "minLength": 1}
TEXT_PART: dict[str, Any] = {
    "type": "object",
    "anyOf": [
        {
            "required": ["type", field],
            "properties": {"type": {"const": kind}, field: {"type": "string"}},
        }
        for kind, field in _TEXT_PARTS.items()
    ],
}
_TOOL_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "arguments": {
                    "anyOf": [
                        {"type": "string", "contentMediaType": "application/json"},
                        {"type": "object"},
                        {"type": "null"},
                    ]
                },
            },
        }
    },
}
PromptField = Annotated[
    list[str | TokenIds],
    PlainValidator(_prompt),
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _IDS, {**_STRINGS, "items": _IDS}]}),
]
Texts = Annotated[
    list[str] | None,
    PlainValidator(_texts),
    WithJsonSchema(
        {"anyOf": [{"type": "null"}, {"type": "string"}, {**_STRINGS, "maxItems": MAX_PROMPTS - 1}]}
    ),
]
Documents = Annotated[
    list[str],
    PlainValidator(_texts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {**_STRINGS, "maxItems": MAX_PROMPTS - 1}]}),
]
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_stop),
    WithJsonSchema(
        {"anyOf": [{"type": ["null", "string"]}, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}]}
    ),
]
BadWords = Annotated[
    tuple[str, ...],
    PlainValidator(_bad_words),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "array",
                    "maxItems": MAX_BAD_WORDS,
                    "items": {"type": "string", "maxLength": MAX_BAD_WORD, "pattern": "[^ ]"},
                },
            ]
        }
    ),
]
TextChoice = Annotated[
    tuple[str, ...] | None,
    PlainValidator(_choice),
    WithJsonSchema({"anyOf": [{"type": "null"}, {**_STRINGS, "maxItems": MAX_CHOICES}]}),
]
Content = Annotated[
    str,
    PlainValidator(content_text),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "string"}, {"type": "array", "items": TEXT_PART}]}),
]

ToolCalls = Annotated[
    list[dict[str, Any]] | None,
    PlainValidator(_tool_calls),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array", "items": _TOOL_CALL}]}),
]

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "maxProperties": MAX_BIASES,
                    "propertyNames": {"pattern": "^[0-9]+$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
            ]
        }
    ),
]
