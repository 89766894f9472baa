"""Calls of Qwen 3 Coder: `<function=NAME>`, and a `<parameter=KEY>` for each argument, as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from serve_apps.parsing.mark_finder import MarkFinder
from serve_apps.parsing.parts import Arguments, CallBegins, CallEnds, Function, Part, Text

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3Coder:
    """See Parser. The arguments become JSON by the types of the function's schema; strings come as they grow.

    Args:
        functions: those that the model may call.
    """

    MARKS: ClassVar[tuple[str, ...]] = (BEGIN, END)
    BEGINS: ClassVar[str | None] = BEGIN

    def __init__(self, functions: Sequence[Function]) -> None:
        self._schemas = {function.name: function.parameters.get("properties", {}) for function in functions}
        self._finder = MarkFinder(BEGIN, FUNCTION)
        self._read = self._text
        self._name = ""
        self._key = ""
        self._value: _Value | None = None
        self._num_arguments = 0

    def feed(self, text: str) -> Sequence[Part]:
        """See Parser."""
        parts: list[Part] = []
        while text:
            text = self._read(text, parts)
        return parts

    def finish(self) -> Sequence[Part]:
        """See Parser."""
        rest = self._finder.flush()
        if self._read == self._text:
            return [Text(rest)] if rest.strip() else []
        if self._read == self._function_name:
            return [Text(FUNCTION + self._name + rest)]
        if self._value is not None:
            # The answer was cut: as much as there is of the value.
            return [Arguments(piece)] if (piece := self._value.add(rest)) else []
        return []

    def _turn(self, read: Any, *marks: str) -> None:
        self._read, self._finder = read, MarkFinder(*marks)

    def _text(self, text: str, parts: list[Part]) -> str:
        before, mark, text = self._finder.feed(text)
        parts += [Text(before)] if before else []
        if mark == FUNCTION:
            self._name = ""
            self._turn(self._function_name, ">")
        return text

    def _function_name(self, text: str, parts: list[Part]) -> str:
        before, mark, text = self._finder.feed(text)
        self._name += before
        if mark is not None:
            self._name = self._name.strip()
            parts.append(CallBegins(self._name))
            self._num_arguments = 0
            self._turn(self._between, PARAMETER, FUNCTION_END, END)
        return text

    def _between(self, text: str, parts: list[Part]) -> str:
        _, mark, text = self._finder.feed(text)
        if mark == PARAMETER:
            self._key = ""
            self._turn(self._parameter_name, ">")
        elif mark is not None:
            parts += [Arguments("}" if self._num_arguments else "{}"), CallEnds()]
            self._turn(self._after, END, BEGIN, FUNCTION)
            if mark == END:
                self._turn(self._text, BEGIN, FUNCTION)
        return text

    def _parameter_name(self, text: str, parts: list[Part]) -> str:
        before, mark, text = self._finder.feed(text)
        self._key += before
        if mark is not None:
            self._key = self._key.strip()
            schema = self._schemas.get(self._name, {})
            self._value = _Value(schema.get(self._key) if isinstance(schema, Mapping) else None)
            opening = ", " if self._num_arguments else "{"
            parts.append(Arguments(opening + json.dumps(self._key, ensure_ascii=False) + ": "))
            self._num_arguments += 1
            self._turn(self._argument, PARAMETER_END, PARAMETER, FUNCTION_END, END)
        return text

    def _argument(self, text: str, parts: list[Part]) -> str:
        before, mark, text = self._finder.feed(text)
        assert self._value is not None
        piece = self._value.add(before)
        if mark is not None:
            piece += self._value.end()
            self._value = None
            self._turn(self._between, PARAMETER, FUNCTION_END, END)
            # Where the closing mark was left out, the next one stands for it.
            text = text if mark == PARAMETER_END else mark + text
        parts += [Arguments(piece)] if piece else []
        return text

    def _after(self, text: str, parts: list[Part]) -> str:
        before, mark, text = self._finder.feed(text)
        parts += [Text(before)] if before.strip() else []
        if mark is not None:
            self._turn(self._text, BEGIN, FUNCTION)
            text = text if mark != FUNCTION else mark + text
        return text


class _Value:
    """Plain text to the JSON of one argument; the line breaks beside its marks are not part of it.

    Args:
        schema: the JSON schema of the argument; None where there is none.
    """

    def __init__(self, schema: Any) -> None:
        kinds = _kinds(schema)
        self._kinds = kinds
        self._streams = kinds <= {"string"}
        self._begun = False
        self._held = ""

    def add(self, text: str) -> str:
        """The JSON that is certain now."""
        if not text:
            return ""
        text = self._held + text
        if not self._streams:
            self._held = text
            return ""
        opening = ""
        if not self._begun:
            self._begun, opening = True, '"'
            text = text.removeprefix("\n")
        self._held = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        return opening + json.dumps(text, ensure_ascii=False)[1:-1]

    def end(self) -> str:
        """The rest."""
        if self._streams:
            return '"' if self._begun else '""'
        text = self._held.removeprefix("\n").removesuffix("\n")
        return json.dumps(_typed(text, self._kinds), ensure_ascii=False)


def _kinds(schema: Any) -> frozenset[str]:
    """The types that a schema allows, as far as it says; none where it says nothing."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set[str]()
    for several in ("anyOf", "oneOf"):
        for one in schema.get(several, ()) if isinstance(schema.get(several), list) else ():
            found |= _kinds(one)
    return frozenset(one for one in found if isinstance(one, str))


def _typed(text: str, kinds: frozenset[str]) -> Any:
    """A value of one of the types, or the text where it is none."""
    word = text.strip()
    if "boolean" in kinds and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word.lower() in ("null", "none") and ("null" in kinds or "string" not in kinds):
        return None
    try:
        value = json.loads(word)
    except ValueError:
        return text
    return text if "string" in kinds and isinstance(value, str) else value
