"""The functions that a request offers to the model, and which of them it is to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema

MAX_NAME = 256
"""Longest name of a function (OpenAI allows 64 characters, other servers more)."""
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that names none."""


@dataclass(frozen=True)
class ToolChoice:
    """What a request says of calls."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None
    """The function that is to be called, where the mode is `named`."""
    allowed: tuple[str, ...] | None = None
    """The only functions that may be called; None: all that are offered."""

    @property
    def forced(self) -> bool:
        """The answer is a call, or several."""
        return self.mode in ("required", "named")

    @property
    def names(self) -> tuple[str, ...]:
        """The functions that it speaks of by name."""
        return (*((self.name,) if self.name is not None else ()), *(self.allowed or ()))


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("must be a list of tools")
    return [_tool(number, tool) for number, tool in enumerate(value)]


def _tool(number: int, tool: Any) -> dict[str, Any]:
    """One tool as chat templates take it; what is null was not said."""
    if not isinstance(tool, dict):
        raise ValueError(f"tool {number} must be an object")
    kind = tool.get("type", "function")
    if kind != "function":
        raise ValueError(f"tool {number} must be a function: this server has no tools of type {kind!r}")
    said = checked_function(tool.get("function"), f"the function of tool {number}")
    return {**tool, "type": "function", "function": said}


def checked_function(function: Any, what: str) -> dict[str, Any]:
    """A function with `name`, `description` and `parameters` of the right types; what is null was not said.

    Raises:
        ValueError: with a sentence.
    """
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"{what} must have a name of 1 to {MAX_NAME} characters")
    if not isinstance(function.get("parameters"), dict | None):
        raise ValueError(f"the parameters of function '{name}' must be a JSON schema, which is an object")
    if not isinstance(function.get("description"), str | None):
        raise ValueError(f"the description of function '{name}' must be a string")
    return {key: value for key, value in function.items() if value is not None}


def _choice(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if value == "any":  # Mistral's word
        return ToolChoice("required")
    if isinstance(value, dict):
        kind, name = value.get("type"), _name_of(value)
        if kind == "function" and name is not None:
            return ToolChoice("named", name)
        allowed = value.get("allowed_tools", value)
        if (
            kind == "allowed_tools"
            and isinstance(allowed, dict)
            and allowed.get("mode") in ("auto", "required")
        ):
            tools = allowed.get("tools")
            names = [_name_of(one) for one in tools] if isinstance(tools, list) else []
            if names and None not in names:
                return ToolChoice(allowed["mode"], allowed=tuple(name for name in names if name is not None))
    raise ValueError(
        "must be 'none', 'auto', 'required', or an object that names a function:"
        ' {"type": "function", "function": {"name": ...}}'
    )


def _name_of(tool: Any) -> str | None:
    inside = tool.get("function", tool) if isinstance(tool, dict) else None
    name = inside.get("name") if isinstance(inside, dict) else None
    return name if isinstance(name, str) and name else None


def schema_of_calls(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, *, parallel: bool
) -> dict[str, Any]:
    """The JSON schema of an answer that is nothing but calls: the arguments of the function that the choice
    names, else a list of `{"name", "parameters"}`.

    Args:
        tools: those that may be called.
        parallel: there may be several calls.
    """
    functions = [tool["function"] for tool in tools]
    if choice.mode == "named":
        (named,) = (function for function in functions if function["name"] == choice.name)
        return dict(named.get("parameters") or NO_ARGUMENTS)
    calls, definitions = _calls(functions)
    several = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **several, "items": {"anyOf": calls}, "$defs": definitions}


def schema_or_calls(schema: Any, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of an answer that keeps to a schema, or is one call as `{"name", "parameters"}`."""
    calls, definitions = _calls(functions)
    definitions["answer"] = _moved(schema, "#/$defs/answer")
    return {"anyOf": [{"$ref": "#/$defs/answer"}, *calls], "$defs": definitions}


def _calls(functions: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A schema for a call of each function, and the definitions that these lead to."""
    definitions: dict[str, Any] = {}
    calls = []
    for number, function in enumerate(functions):
        # Each schema keeps its own definitions, and its references lead to them.
        home = f"f{number}"
        definitions[home] = _moved(function.get("parameters") or NO_ARGUMENTS, f"#/$defs/{home}")
        members = {"name": {"const": function["name"]}, "parameters": {"$ref": f"#/$defs/{home}"}}
        calls.append(
            {
                "type": "object",
                "properties": members,
                "required": list(members),
                "additionalProperties": False,
            }
        )
    return calls, definitions


def _moved(schema: Any, home: str) -> Any:
    """A schema whose references to its own root lead to where it stands now."""
    if isinstance(schema, list):
        return [_moved(one, home) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: home + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if key in ("const", "enum", "default", "examples")
        else _moved(value, home)
        for key, value in schema.items()
        if key != "$id"
    }


FUNCTION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME},
        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    },
}
_TOOL = {
    "type": "object",
    "required": ["function"],
    "properties": {"type": {"const": "function"}, "function": FUNCTION_SCHEMA},
}
_HAS_NAME = {"required": ["name"], "properties": {"name": {"type": "string", "minLength": 1}}}
_NAMES_ONE = {
    "type": "object",
    "anyOf": [
        {"required": ["function"], "properties": {"function": {"type": "object", **_HAS_NAME}}},
        {**_HAS_NAME, "not": {"required": ["function"]}},
    ],
}
"""As the chat API nests it, or flat as /v1/responses does."""
_NAMED = {**_NAMES_ONE, "required": ["type"], "properties": {"type": {"const": "function"}}}
_MODES = {
    "required": ["mode", "tools"],
    "properties": {
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "minItems": 1, "items": _NAMES_ONE},
    },
}
_ALLOWED = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"const": "allowed_tools"}},
    "anyOf": [
        {"required": ["allowed_tools"], "properties": {"allowed_tools": {"type": "object", **_MODES}}},
        {**_MODES, "not": {"required": ["allowed_tools"]}},
    ],
}
Tools = Annotated[
    list[dict[str, Any]] | None,
    PlainValidator(_tools),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array", "items": _TOOL}]}),
]
Choice = Annotated[
    ToolChoice | None,
    PlainValidator(_choice),
    WithJsonSchema(
        {"anyOf": [{"type": "null"}, {"enum": ["none", "auto", "required", "any"]}, _NAMED, _ALLOWED]}
    ),
]
