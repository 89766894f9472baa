"""The `tools` and the `tool_choice` of /v1/messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema

from serve_apps.openai.tools import FUNCTION_SCHEMA, MAX_NAME, ToolChoice, checked_function


@dataclass(frozen=True)
class MessagesToolSet:
    """What a request offers to the model."""

    functions: Sequence[dict[str, Any]] = ()
    """As the chat API has them."""
    others: Sequence[tuple[int, str]] = ()
    """Tools that only Anthropic's models know: number and type."""


@dataclass(frozen=True)
class PickedTool:
    """What `tool_choice` says."""

    choice: ToolChoice
    parallel: bool | None
    """Whether an answer may have several calls."""


def _tools(value: Any) -> MessagesToolSet | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("must be a list of tools")
    functions: list[dict[str, Any]] = []
    others: list[tuple[int, str]] = []
    for number, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(kind, str | None):
            raise ValueError(f"tool {number} must be an object, and its type a string")
        if kind is None or kind == "custom":
            functions.append(_function(tool, number))
        else:
            others.append((number, kind))
    return MessagesToolSet(functions, others)


def _function(tool: dict[str, Any], number: int) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise ValueError(f"the input_schema of tool {number} must be a JSON schema, which is an object")
    said = checked_function({key: tool.get(key) for key in ("name", "description")}, f"tool {number}")
    return {"type": "function", "function": {**said, "parameters": schema}}


_MODES: dict[str, Literal["auto", "required", "none"]] = {"auto": "auto", "any": "required", "none": "none"}


def _choice(value: Any) -> PickedTool | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    single = value.get("disable_parallel_tool_use") if isinstance(value, dict) else None
    if not isinstance(single, bool | None):
        raise ValueError("must have true or false as its disable_parallel_tool_use")
    parallel = None if single is None else not single
    if kind == "tool" and isinstance(value.get("name"), str) and value["name"]:
        return PickedTool(ToolChoice("named", value["name"]), parallel)
    if isinstance(kind, str) and kind in _MODES:
        return PickedTool(ToolChoice(_MODES[kind]), parallel)
    raise ValueError(
        "must be an object of type 'auto', 'any' or 'none', or {\"type\": \"tool\", \"name\": ...}"
    )


_NULL: dict[str, Any] = {"type": "null"}
_SINGLE = {"disable_parallel_tool_use": {"anyOf": [_NULL, {"type": "boolean"}]}}
_FUNCTION = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME},
        "description": FUNCTION_SCHEMA["properties"]["description"],
        "input_schema": {"type": "object"},
    },
}
_OTHER = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string", "not": {"const": "custom"}}},
    "description": "Refused, unless `tool_choice` has it that it is not called.",
}
MessagesTools = Annotated[
    MessagesToolSet | None,
    PlainValidator(_tools),
    WithJsonSchema({"anyOf": [_NULL, {"type": "array", "items": {"anyOf": [_FUNCTION, _OTHER]}}]}),
]
MessagesChoice = Annotated[
    PickedTool | None,
    PlainValidator(_choice),
    WithJsonSchema(
        {
            "anyOf": [
                _NULL,
                {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"enum": [*_MODES]}, **_SINGLE},
                },
                {
                    "type": "object",
                    "required": ["type", "name"],
                    "properties": {
                        "type": {"const": "tool"},
                        "name": {"type": "string", "minLength": 1},
                        **_SINGLE,
                    },
                },
            ]
        }
    ),
]
