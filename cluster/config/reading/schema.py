"""The JSON Schema of the config file, and what it says about the value at a key path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from cluster.config.reading.positions import KeyPath
from cluster.config.sections.root import ShoalConfig
from cluster.config.sections.section import NAME_PATTERN
from cluster.config.sections.train import TASK_PATTERN, TASKS

NAME_RULE = (
    "a name of lower-case letters, digits, `-`, `_` and `.`, with a letter or digit at both ends"
    " and at most 63 characters"
)
PATTERN_RULES = {
    NAME_PATTERN: NAME_RULE,
    TASK_PATTERN: f"{', '.join(f'`{task}`' for task in TASKS)}, or a class of yours, `your.module:Task`",
}
"""What a text that follows a pattern should be, in words."""

SchemaPart = Mapping[str, Any]
"""A part of a JSON Schema."""


def json_schema() -> dict[str, Any]:
    """The schema for editors; an empty section (null) is allowed where it means the defaults."""
    schema = ShoalConfig.model_json_schema()
    schema["$defs"] = {name: _for_editors(part, schema["$defs"]) for name, part in schema["$defs"].items()}
    schema = _for_editors(schema, schema["$defs"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "shoal.yaml"}


def _for_editors(part: dict[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    properties = {key: _or_empty(value, parts) for key, value in part.get("properties", {}).items()}
    return {**part, "properties": properties}


def _or_empty(value: dict[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The same value, or null where that stands for the defaults of a section."""
    if "$ref" in value:
        target = parts[value["$ref"].rsplit("/", 1)[-1]]
        if "properties" in target and not target.get("required"):
            rest = {key: item for key, item in value.items() if key != "$ref"}
            return {"anyOf": [{"$ref": value["$ref"]}, {"type": "null"}], **rest}
        return value
    if "patternProperties" in value:
        entries = {pattern: _or_empty(item, parts) for pattern, item in value["patternProperties"].items()}
        return {
            **value,
            "patternProperties": entries,
            "additionalProperties": False,
            "type": ["object", "null"],
        }
    return value


@cache
def _raw_schema() -> dict[str, Any]:
    return ShoalConfig.model_json_schema()


def _resolve(node: SchemaPart) -> SchemaPart:
    """The node with its `$ref` and its "or null" taken away; its own description wins."""
    if "anyOf" in node:
        options = [option for option in node["anyOf"] if option.get("type") != "null"]
        if len(options) == 1:
            return {**_resolve(options[0]), **{key: node[key] for key in ("description",) if key in node}}
    if "$ref" in node:
        target = _raw_schema()["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        return {**target, **{key: node[key] for key in ("description",) if key in node}}
    return node


def node_at(path: KeyPath) -> SchemaPart | None:
    """What the schema says about the value at `path`; None where it knows no such key."""
    node: SchemaPart | None = _raw_schema()
    for step in path:
        if node is None:
            return None
        node = _child(_resolve(node), step)
    return node


def _child(node: SchemaPart, step: str | int) -> SchemaPart | None:
    if isinstance(step, int):
        found: SchemaPart | None = node.get("items")
        return found
    if step in node.get("properties", {}):
        return dict(node["properties"][step])
    return next(iter(node.get("patternProperties", {}).values()), None)


def keys_at(path: KeyPath) -> list[str]:
    """The keys that a section knows; empty for lists, scalars and sections of named entries."""
    node = node_at(path)
    return [] if node is None else list(_resolve(node).get("properties", {}))


def is_named_table(path: KeyPath) -> bool:
    """Whether the keys at `path` are names that the user chooses (train_jobs, serve_apps)."""
    node = node_at(path)
    return node is not None and "patternProperties" in _resolve(node)


def keys_below(path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Every key of the sections inside of the one at `path`, with the way there (relative to it)."""
    for key in keys_at(path):
        for inner in keys_at((*path, key)):
            yield (key, inner), inner


def describe(path: KeyPath) -> str | None:
    """What the config says the value at `path` means, in one line."""
    node = node_at(path)
    text = None if node is None else _resolve(node).get("description")
    return None if not text else str(text).split("\n", 1)[0].rstrip(".")


def choices(path: KeyPath) -> list[str]:
    """The words allowed at `path`; empty where it is no choice."""
    node = node_at(path)
    if node is None:
        return []
    node = _resolve(node)
    words = node["const"] if "const" in node else node.get("enum", node.get("examples", []))
    return [str(item) for item in words] if isinstance(words, list) else [str(words)]


def allowed(path: KeyPath) -> str:
    """What may stand at `path`, as the end of "should be …"."""
    node = node_at(path)
    if node is None:
        return "left out"
    words = _allowed(_resolve(node))
    nullable = any(option.get("type") == "null" for option in node.get("anyOf", []))
    return f"{words}, or null" if nullable else words


def _allowed(node: SchemaPart) -> str:
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return "one of " + ", ".join(f"`{item}`" for item in node["enum"])
    kind = node.get("type")
    if kind == "integer":
        return "a whole number" + _bounds(node)
    if kind == "number":
        return "a number" + _bounds(node)
    if kind == "boolean":
        return "true or false"
    if kind == "string":
        return PATTERN_RULES.get(node.get("pattern", ""), "text" + _length(node))
    if kind == "array":
        return "a list" + _list_length(node)
    if "patternProperties" in node:
        return "a section of names, each with its own section"
    if kind == "object":
        keys = [f"`{key}`" for key in node.get("properties", {})]
        return f"a section with the key{'s' if len(keys) != 1 else ''} {', '.join(keys)}"
    return "something else"


def _bounds(node: SchemaPart) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    if low is not None and low == high:
        return f" that is {low}"
    lower = f"of at least {low:g}" if low is not None else f"above {above:g}" if above is not None else ""
    upper = f"at most {high}" if high is not None else f"below {below:g}" if below is not None else ""
    if below is not None and below > 10**6:
        upper = f"below {below}"
    return "".join(f" {part}" for part in (" and ".join(part for part in (lower, upper) if part),) if part)


def _length(node: SchemaPart) -> str:
    return ", not empty" if node.get("minLength") == 1 else ""


def _list_length(node: SchemaPart) -> str:
    low, high = node.get("minItems"), node.get("maxItems")
    if low is None or high is None:
        return ""
    return f" of {low} to {high} entries"
