"""What the requests' schemas are made of: fields that come in several forms, each read into one.

Whatever is wrong with a body is found at its first mistake: a body of mistakes costs no more than its size.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

MAX_PROMPTS = 2048
"""Most prompts of one request, as OpenAI's API takes inputs."""
MAX_STOPS = 16
"""Most stop strings of one request (OpenAI allows 4, vLLM any number)."""
MAX_BIASES = 1024
"""Most token ids of one request's `logit_bias`."""
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
        if isinstance(document, dict) and not document.keys() <= (known := cls.model_fields).keys():
            unknown = next(name for name in document if name not in known)
            raise PydanticCustomError(UNKNOWN_FIELD, "unknown field {name}", {"name": unknown})
        return document


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
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
Prompt = Annotated[
    list[str | TokenIds],
    PlainValidator(_prompt),
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _IDS, {**_STRINGS, "items": _IDS}]}),
]
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_stop),
    WithJsonSchema(
        {"anyOf": [{"type": "null"}, _STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}]}
    ),
]
Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "string"}, {"type": "array", "items": _TEXT_PART}]}),
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
