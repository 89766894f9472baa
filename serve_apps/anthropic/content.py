"""The `system` and the `messages` of /v1/messages: turns whose content is text, or blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from serve_apps.openai.errors import shortened
from serve_apps.openai.turns import Turn, Turns, paragraphs

ROLES = ("user", "assistant", "system")
_ACCOUNTING = "x-anthropic-billing-header:"
"""How a block of `system` begins that claude-code writes for Anthropic's accounts, not for a model."""
_NOT_TEXT = ("image", "document", "search_result", "container_upload")


def _system(value: Any) -> str | None:
    """The text of `system`, its blocks as paragraphs."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text blocks")
    texts = [_text(block, f"block {number}") for number, block in enumerate(value)]
    return paragraphs(text for text in texts if not text.startswith(_ACCOUNTING))


def _turns(value: Any) -> list[Turn]:
    """The turns that `messages` are."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of messages that is not empty")
    turns = Turns()
    for number, message in enumerate(value):
        what = f"message {number}"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"{what} must be an object whose role is one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str | list):
            raise ValueError(f"the content of {what} must be a string or a list of blocks")
        if role == "assistant":
            _add_answer(turns, content, what)
        elif role == "user":
            _add_user(turns, content, what)
        else:
            _add_system(turns, content, what)
    return turns.done()


def _add_system(turns: Turns, content: str | list[Any], what: str) -> None:
    text = paragraphs(_texts(content, what))
    if turns.begun:
        # Many templates take a system's turn at the beginning only.
        turns.say_more("user", text)
    else:
        turns.system(text)


def _add_user(turns: Turns, content: str | list[Any], what: str) -> None:
    texts: list[str] = []
    for number, block in enumerate(content) if isinstance(content, list) else ():
        place = f"block {number} of {what}"
        if _kind(block, place) == "tool_result":
            # What calls have brought comes first, wherever it stands.
            turns.result(_string(block, "tool_use_id", place), _result(block, place))
        else:
            texts.append(_text(block, place))
    if isinstance(content, str):
        texts = [content]
    if texts or not content:
        turns.say_more("user", paragraphs(texts))


def _add_answer(turns: Turns, content: str | list[Any], what: str) -> None:
    if isinstance(content, str):
        turns.answer(content)
        return
    texts: list[str] = []
    calls = []
    for number, block in enumerate(content):
        place = f"block {number} of {what}"
        kind = _kind(block, place)
        if kind == "thinking":
            if thought := _string(block, "thinking", place):
                turns.think(thought)
        elif kind == "redacted_thinking":
            continue  # nobody but Anthropic can read it
        elif kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict | None):
                raise ValueError(f"the input of {place} must be an object")
            calls.append((_string(block, "id", place), _string(block, "name", place), given or {}))
        else:
            texts.append(_text(block, place))
    # Text goes on where it was cut, as an answer may be that this request goes on with.
    if text := "".join(texts):
        turns.answer(text)
    for call in calls:
        turns.call(*call)


def _result(block: Mapping[str, Any], what: str) -> str:
    """What a call has brought; that it failed is said in words: templates have no other place for it."""
    content = block.get("content")
    if not isinstance(content, str | list | None):
        raise ValueError(f"the content of {what} must be a string or a list of blocks")
    text = paragraphs(_texts(content or "", what))
    failed = block.get("is_error")
    if not isinstance(failed, bool | None):
        raise ValueError(f"is_error of {what} must be true or false")
    return f"Error: {text}" if failed else text


def _texts(content: str | list[Any], what: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, f"block {number} of {what}") for number, block in enumerate(content)]


def _kind(block: Any, what: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"{what} must be an object with a type")
    return kind


def _text(block: Any, what: str) -> str:
    kind = _kind(block, what)
    if kind in _NOT_TEXT:
        raise ValueError(f"{what} is of type '{kind}', but only text is supported")
    if kind != "text":
        raise ValueError(f"{what} is of type {shortened(repr(kind))}, which cannot stand here")
    return _string(block, "text", what)


def _string(block: Mapping[str, Any], name: str, what: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ValueError(f"the {name} of {what} must be a string")
    return value


_STRING = {"type": "string"}
_OBJECT = {"type": "object"}


def _block(kind: str, required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["type", *required],
        "properties": {"type": {"const": kind}, **properties},
    }


def _blocks(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": [*kinds]}}]}


def _message(roles: list[str], content: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": roles}, "content": content},
    }


_NULL: dict[str, Any] = {"type": "null"}
_TEXT = _block("text", ["text"], text=_STRING)
_RESULT = _block(
    "tool_result",
    ["tool_use_id"],
    tool_use_id=_STRING,
    content={"anyOf": [_NULL, *_blocks(_TEXT)["anyOf"]]},
    is_error={"anyOf": [_NULL, {"type": "boolean"}]},
)
_USE = _block("tool_use", ["id", "name"], id=_STRING, name=_STRING, input={"anyOf": [_NULL, _OBJECT]})
_THINKING = _block("thinking", ["thinking"], thinking=_STRING)
_REDACTED = _block("redacted_thinking", [])
System = Annotated[
    str | None,
    PlainValidator(_system),
    WithJsonSchema({"anyOf": [_NULL, *_blocks(_TEXT)["anyOf"]]}),
]
Messages = Annotated[
    list[Turn],
    PlainValidator(_turns),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    _message(["user"], _blocks(_TEXT, _RESULT)),
                    _message(["assistant"], _blocks(_TEXT, _THINKING, _REDACTED, _USE)),
                    _message(["system"], _blocks(_TEXT)),
                ]
            },
        }
    ),
]
