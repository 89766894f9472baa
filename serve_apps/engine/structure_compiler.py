"""A process of its own that compiles one structure: its standard input to a grammar, or to what is wrong.

It imports nothing of ours, and is started by its file's name: see `structures`.
"""

from __future__ import annotations

import json
import re
import resource
import sys

MEMORY_BYTES = 4 * 1024**3
"""Of addresses, most of which are never used."""
NAMES = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "choice",
    "grammar": "grammar",
}
"""Kinds of structures, and what a user calls them."""
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")
_SPECIAL_TOKEN = "<special_token>"
_DATA = frozenset({"const", "enum", "default", "examples"})
_ONE_WAY = {"whitespace_flexible": False}
"""Without it a weak model may write blanks until its tokens are used up."""


def compile_structure(kind: str, text: str) -> dict[str, str]:
    """`grammar`, as llguidance writes it, and the `text` that it is of, or `error`."""
    from llguidance import LLMatcher, grammar_from

    if kind == "json_schema":
        return compile_schema(text)
    try:
        grammar = grammar_from(kind, text)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - its reader of grammars is Python, and may fail in any way
        return {"error": f"the {NAMES[kind]} is not valid: {_line(str(error))}"}
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        return {"error": f"the {NAMES[kind]} is not valid: {_line(messages[0])}"}
    if any(_SPECIAL_TOKEN in message for message in messages):
        return {"error": "the grammar names a special token, which is no text"}
    return {"grammar": grammar, "text": text}


def compile_schema(json_schema: str) -> dict[str, str]:
    """As `compile_structure`, of a JSON schema; `text` is without what holds answers to nothing."""
    from llguidance import LLMatcher

    while True:
        try:
            grammar = LLMatcher.grammar_from_json_schema(json_schema, defaults=_ONE_WAY)  # type: ignore[arg-type]
        except ValueError as error:
            return {"error": f"the JSON schema is not valid: {error}"}
        wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        if not wrong:
            return {"grammar": grammar, "text": json_schema}
        unknown = _UNKNOWN_FORMAT.search(messages[0])
        if unknown is None:
            return {"error": f"the JSON schema cannot be kept to: {_line(messages[0])}"}
        # A format that nobody knows says how a string is meant, and holds it to nothing.
        left = json.dumps(without_format(json.loads(json_schema), unknown[1]))
        if left == json_schema:
            return {"error": f"the JSON schema cannot be kept to: {_line(messages[0])}"}
        json_schema = left


def without_format(schema: object, name: str) -> object:
    """A schema without the keyword `format` where it has this value; data in it stays as it is."""
    if isinstance(schema, list):
        return [without_format(one, name) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _DATA else without_format(value, name)
        for key, value in schema.items()
        if (key, value) != ("format", name)
    }


def _line(message: str) -> str:
    """The first line of what the library says, as an answer may repeat it."""
    line = message.strip().splitlines()[0] if message.strip() else "no reason was given"
    return line if len(line) <= 300 else line[:299] + "…"


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    json.dump(compile_structure(**json.load(sys.stdin)), sys.stdout)
