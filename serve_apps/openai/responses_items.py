"""The `input` of /v1/responses: items of a conversation, also those that a client hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from serve_apps.openai.errors import shortened
from serve_apps.openai.fields import TEXT_PART, content_text
from serve_apps.openai.turns import OPERATOR, Turn, Turns, arguments_of, paragraphs

ROLES = ("user", "assistant", "system", "developer")


def full_name(namespace: str | None, name: str) -> str:
    """What the model knows a function by, which may stand in a namespace."""
    return f"{namespace}__{name}" if namespace else name


def turns_of(value: Any) -> list[Turn]:
    """The turns that an `input` is.

    Raises:
        ValueError: with a sentence.
    """
    turns = Turns()
    if isinstance(value, str):
        turns.say("user", value)
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            _add(turns, number, item)
    else:
        raise ValueError("must be a string, or a list of items that is not empty")
    return turns.done()


def _add(turns: Turns, number: int, item: Any) -> None:
    if not isinstance(item, dict):
        raise ValueError(f"item {number} must be an object")
    kind = item.get("type")
    if kind is None or kind == "":
        kind = "message" if "role" in item else None
    add = _KINDS.get(kind) if isinstance(kind, str) else None
    if kind == "item_reference":
        raise ValueError(
            f"item {number} refers to an answer that was sent before, and this server keeps none: hand the"
            " items themselves back (with the AI SDK, providerOptions.openai.store: false)"
        )
    if add is None:
        raise ValueError(
            f"item {number} is of type {shortened(repr(kind))}, which this server does not know; it takes"
            f" {', '.join(_KINDS)}"
        )
    add(turns, item, f"item {number}")


def _message(turns: Turns, item: Mapping[str, Any], what: str) -> None:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"the role of {what} must be one of {', '.join(ROLES)}")
    text = _text(content, f"the content of {what}")
    if role in OPERATOR:
        turns.system(text, role)
    elif role == "assistant":
        turns.answer(text)
    else:
        turns.say(role, text)


def _call(turns: Turns, item: Mapping[str, Any], what: str) -> None:
    namespace = item.get("namespace")
    if not isinstance(namespace, str | None):
        raise ValueError(f"the namespace of {what} must be a string")
    name = full_name(namespace, _string(item, "name", what))
    turns.call(_string(item, "call_id", what), name, arguments_of(_string(item, "arguments", what)))


def _output(turns: Turns, item: Mapping[str, Any], what: str) -> None:
    turns.result(_string(item, "call_id", what), _text(item.get("output"), f"the output of {what}"))


def _reasoning(turns: Turns, item: Mapping[str, Any], what: str) -> None:
    texts: list[str] = []
    for name in ("content", "summary"):
        parts = item.get(name)
        if not isinstance(parts, list | None):
            raise ValueError(f"the {name} of {what} must be a list")
        for part in parts or ():
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                raise ValueError(f"the {name} of {what} must be a list of parts that have a text")
            texts.append(text)
        if texts:
            break  # the summary says the same once more
    if any(texts):
        turns.think(paragraphs(texts))


_KINDS: Mapping[str, Callable[[Turns, Mapping[str, Any], str], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}


def _string(item: Mapping[str, Any], name: str, what: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ValueError(f"the {name} of {what} must be a string")
    return value


def _text(value: Any, what: str) -> str:
    if value is None:
        raise ValueError(f"{what} is missing")
    try:
        return content_text(value)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}
_STRING = {"type": "string"}
_OR_NONE = {"anyOf": [{"type": "null"}, _STRING]}
_PARTS = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "array",
            "items": {"type": "object", "required": ["text"], "properties": {"text": _STRING}},
        },
    ]
}


def _item(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


_ITEM = {
    "anyOf": [
        _item(
            ["role", "content"],
            {"type": {"enum": ["message", "", None]}, "role": {"enum": [*ROLES]}, "content": _CONTENT},
        ),
        _item(
            ["type", "call_id", "name", "arguments"],
            {
                "type": {"const": "function_call"},
                "call_id": _STRING,
                "name": _STRING,
                "namespace": _OR_NONE,
                "arguments": {"type": "string", "contentMediaType": "application/json"},
            },
        ),
        _item(
            ["type", "call_id", "output"],
            {"type": {"const": "function_call_output"}, "call_id": _STRING, "output": _CONTENT},
        ),
        _item(["type"], {"type": {"const": "reasoning"}, "content": _PARTS, "summary": _PARTS}),
    ]
}
Input = Annotated[
    list[Turn],
    PlainValidator(turns_of),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _ITEM}]}),
]
