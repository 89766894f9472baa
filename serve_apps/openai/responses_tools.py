"""The `tools` of /v1/responses: functions, alone or in namespaces, and tools that only OpenAI has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from serve_apps.openai.errors import ApiError, bad_request, shortened
from serve_apps.openai.responses_items import full_name
from serve_apps.openai.tools import FUNCTION_SCHEMA, ToolChoice, checked_function


@dataclass(frozen=True)
class OfferedTools:
    """What a request offers to the model."""

    functions: Sequence[dict[str, Any]] = ()
    """As the chat API has them; one in a namespace is `namespace__name`."""
    given: Sequence[Mapping[str, Any]] = ()
    """The same as the client gave them."""
    homes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The namespace and the name of functions in namespaces, by the names that the model knows."""
    others: Sequence[tuple[int, str]] = ()
    """Tools that this server does not have: number and type."""

    def shown(self) -> list[Mapping[str, Any]]:
        """As the answer repeats them."""
        usual: Mapping[str, Any] = {"description": None, "parameters": None, "strict": None}
        return [
            {**usual, **tool} if tool["type"] == "function" else {"description": "", **tool}
            for tool in self.given
        ]


def _offered(value: Any) -> OfferedTools | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("must be a list of tools")
    functions: list[dict[str, Any]] = []
    offered: list[Mapping[str, Any]] = []
    homes: dict[str, tuple[str, str]] = {}
    others: list[tuple[int, str]] = []
    for number, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"tool {number} must be an object with a type")
        if kind == "function":
            functions.append(_function(tool, f"tool {number}"))
            offered.append(tool)
        elif kind == "namespace":
            functions += _namespace(tool, f"tool {number}", homes)
            offered.append(tool)
        elif kind != "web_search" or tool.get("external_web_access") is not False:
            # A search that may not reach the web, which codex offers, finds nothing here: it is passed over.
            others.append((number, kind))
    return OfferedTools(functions, offered, homes, others)


def _function(tool: Any, what: str, namespace: str | None = None) -> dict[str, Any]:
    said = checked_function(tool, what)
    function = {key: said[key] for key in ("name", "description", "parameters") if key in said}
    return {"type": "function", "function": {**function, "name": full_name(namespace, function["name"])}}


def _namespace(tool: Mapping[str, Any], what: str, homes: dict[str, tuple[str, str]]) -> list[dict[str, Any]]:
    name, tools = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name or not isinstance(tools, list):
        raise ValueError(f"{what} must have a name and a list of tools, as it is a namespace")
    functions = []
    for number, one in enumerate(tools):
        if not isinstance(one, dict) or one.get("type") != "function":
            raise ValueError(f"tool {number} of {what} must be a function")
        functions.append(_function(one, f"tool {number} of {what}", name))
        homes[functions[-1]["function"]["name"]] = (name, one["name"])
    return functions


def check_others(
    others: Sequence[tuple[int, str]], choice: ToolChoice | None, *, ignore_unknown: bool, instead: str
) -> None:
    """Refuse tools that this server does not have, unless none of them could be called anyway.

    Args:
        others: number and type of each.
        instead: what the client can do.

    Raises:
        ApiError
    """
    if ignore_unknown or not others:
        return
    if choice is not None and (choice.mode in ("none", "named") or choice.allowed is not None):
        return
    number, kind = others[0]
    raise _no_such_tool(number, kind, instead)


def _no_such_tool(number: int, kind: str, instead: str) -> ApiError:
    return bad_request(
        f"'tools.{number}' is of type '{shortened(kind)}', which this server does not have; {instead}.",
        param="tools",
        code="unsupported_tool",
    )


_FLAT = {
    **FUNCTION_SCHEMA,
    "required": ["type", "name"],
    "properties": {**FUNCTION_SCHEMA["properties"], "type": {"const": "function"}},
}
_NAMESPACE = {
    "type": "object",
    "required": ["type", "name", "tools"],
    "properties": {
        "type": {"const": "namespace"},
        "name": {"type": "string", "minLength": 1},
        "tools": {"type": "array", "items": _FLAT},
    },
}
_OTHER = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string", "not": {"enum": ["function", "namespace"]}}},
    "description": "Refused, unless `tool_choice` has it that it is not called.",
}
ResponsesTools = Annotated[
    OfferedTools | None,
    PlainValidator(_offered),
    WithJsonSchema(
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"anyOf": [_FLAT, _NAMESPACE, _OTHER]}}]}
    ),
]
